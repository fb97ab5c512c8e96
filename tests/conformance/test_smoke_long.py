"""More tests of other folders that each backend runs: those that take compilers long."""

# As in test_smoke.py.
# ruff: noqa: F401
import pytest

from tests.data.test_changed_arrays import test_what_a_body_sets_for_its_epoch_is_not_restored
from tests.data.test_changing_lengths import (
    test_a_run_resumes_in_an_epoch_of_another_length,
    test_a_stream_continues_where_the_epoch_before_left_it,
)
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
from tests.hooks.test_keras_callbacks import test_an_epoch_that_a_further_call_continues_begins_once
from tests.hooks.test_keras_callbacks_tasks import (
    test_terminate_on_nan_replaces_the_default_nonfinite_hook,
    test_the_optimizer_is_the_one_that_the_task_trains_with,
)
from tests.hooks.test_profiler import test_a_trace_and_a_table
from tests.hooks.test_tensorboard import test_numbers
from tests.run.test_hook_states import (
    test_moved_hooks_keep_their_states,
    test_the_best_weights_are_those_of_the_hook_that_is_left,
)
from tests.run.test_loop import (
    test_a_source_of_unknown_length_that_may_never_end_is_named,
    test_evaluate_predict_and_call_change_nothing,
    test_what_is_read_to_the_end_must_have_one,
)
from tests.run.test_loop_hooks import (
    test_a_hook_at_the_end_of_an_epoch_sees_its_record,
    test_a_state_saved_by_a_hook_at_the_end_of_an_epoch_has_its_record,
)
from tests.run.test_reporter import test_a_resumed_run_warns_again_and_does_not_log_it_again
from tests.run.test_resume import (
    test_a_resumed_loop_evaluates_and_predicts_before_it_trains,
    test_a_run_interrupted_often_equals_an_uninterrupted_run,
)
from tests.run.test_rollback import test_a_rollback_may_return_to_the_previous_epoch
from tests.run.test_saving import test_a_model_with_a_constant_that_is_not_finite_is_saved
from tests.steps.test_averages import test_the_end_is_that_of_fit
from tests.steps.test_frozen_copy import (
    test_a_copy_trains_is_saved_and_is_copied_again,
    test_a_layer_with_lora_keeps_its_alpha,
    test_an_adapted_lookup_keeps_its_vocabulary,
)
from tests.steps.test_reviewed import test_freezing_a_layer_is_seen
from tests.steps.test_supervised import test_labels_for_some_of_the_outputs_are_explained
from tests.testing.test_certify import test_an_exact_task_is_certified
from tests.testing.test_kit import test_a_correct_task_passes_the_kit
from tests.tuning.test_trials import test_the_value_of_a_trial_is_that_of_the_weights_it_leaves

pytestmark = pytest.mark.long
