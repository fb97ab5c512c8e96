"""More tests of other folders that each backend runs: those that take compilers long."""

# As in test_smoke.py.
# ruff: noqa: F401
import pytest

from tests.data.test_pipelines import (
    files,
    test_a_run_resumes_at_every_batch_as_if_it_were_never_interrupted,
)
from tests.doctor.test_inspect import test_a_finding_names_path_numbers_line_and_fix
from tests.doctor.test_replay import noisy_run, test_a_replayed_step_equals_the_log_bit_for_bit
from tests.hooks.test_gradient_health import (
    test_a_step_that_calls_python_is_not_measured_and_the_log_has_a_note,
    test_training_is_equal_to_the_bit_and_what_is_measured_is_that_of_the_step,
)
from tests.hooks.test_keras_callbacks_tasks import (
    test_terminate_on_nan_replaces_the_default_nonfinite_hook,
    test_the_optimizer_is_the_one_that_the_task_trains_with,
)
from tests.hooks.test_profiler import test_a_trace_and_a_table
from tests.hooks.test_tensorboard import test_numbers
from tests.run.test_loop import test_evaluate_predict_and_call_change_nothing
from tests.run.test_resume import (
    test_a_resumed_loop_evaluates_and_predicts_before_it_trains,
    test_a_run_interrupted_often_equals_an_uninterrupted_run,
)
from tests.run.test_rollback import test_a_rollback_may_return_to_the_previous_epoch
from tests.steps.test_averages import test_the_end_is_that_of_fit
from tests.steps.test_frozen_copy import test_a_copy_trains_is_saved_and_is_copied_again
from tests.steps.test_reviewed import test_freezing_a_layer_is_seen
from tests.testing.test_certify import test_an_exact_task_is_certified
from tests.testing.test_kit import test_a_correct_task_passes_the_kit

pytestmark = pytest.mark.long
