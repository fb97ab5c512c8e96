"""Tests of other folders that each backend runs: what they test, PyTorch alone tests further."""

# Imported tests need their fixtures. PyTorch runs them where they are: see conftest.py.
# ruff: noqa: F401
from tests.cli.test_one_backend import (
    folder,
    test_commands_that_open_a_run_use_its_backend,
    test_messages_of_the_import_are_hidden,
)
from tests.data.test_changed_arrays import (
    test_a_run_resumes_with_the_values_of_the_arrays,
    test_a_step_sees_the_values_that_the_arrays_have_when_it_begins,
    test_changing_arrays_are_read_for_each_batch,
)
from tests.data.test_locked_arrays import (
    test_the_error_of_an_assignment_is_explained,
    test_values_of_an_array_that_was_unlocked_are_seen_by_the_next_call,
)
from tests.data.test_other_sources import test_another_source_in_compiled_and_eager_steps
from tests.doctor.test_find_lr import test_each_step_has_its_own_rate
from tests.doctor.test_replay_nonfinite import test_nan_in_a_batch_is_traced_to_its_rows
from tests.hooks.test_keras_callbacks_every import test_nan_as_an_error
from tests.hooks.test_keras_callbacks_tasks import test_a_distribution_strategy_is_refused
from tests.run.test_directory import test_a_finished_run_is_reported_and_has_its_final_state
from tests.run.test_faults import (
    forks,
    test_a_run_killed_often_within_one_epoch_ends_as_if_it_had_not_been,
    whole,
)
from tests.run.test_faults_changes import (
    test_a_run_of_another_backend_or_version_resumes_from_the_same_bits,
)
from tests.run.test_loop import test_a_changed_python_value_is_named_and_the_step_recompiled
from tests.run.test_loop_errors import test_pytorchs_compilers_are_refused_on_other_backends
from tests.run.test_nonfinite import (
    test_variables_of_every_float_dtype_are_checked,
    test_weights_ruined_by_the_data_end_the_run,
)
from tests.run.test_recompiled import test_a_batch_of_another_shape_or_dtype_is_named_once
from tests.run.test_resume import test_an_interrupted_run_equals_an_uninterrupted_run
from tests.run.test_resume_constants import (
    test_a_float_that_a_hook_doubles,
    test_values_changed_by_hooks_are_as_in_an_uninterrupted_run,
)
from tests.run.test_saving import test_arrays_of_a_hook_are_saved_as_they_were_at_that_step
from tests.run.test_weights import test_a_call_that_changed_no_weight_is_reported
from tests.steps.test_errors import (
    execution,
    message,
    test_a_python_value_that_the_step_changes,
    test_a_variable_that_the_loss_does_not_reach_is_named,
    test_after_an_error_the_next_step_works,
    test_an_error_in_the_step_keeps_its_traceback,
    test_anything_else_that_no_attribute_reaches,
    test_invalid_return_values_of_a_step,
    test_variables_created_again_in_each_step,
)
from tests.steps.test_frozen_copy import test_arrays_of_a_copy_from_a_configuration_are_its_own
from tests.steps.test_mistakes import (
    options,
    test_a_tensor_kept_in_an_attribute,
    test_random_numbers_that_are_not_of_keras,
    test_tensors_that_a_step_puts_into_containers,
)
from tests.steps.test_nested_objects import test_metrics_of_other_objects
from tests.steps.test_optimizer_union import test_both_branches_of_cond_count
from tests.steps.test_own_objects import test_a_plain_object_holds_the_state_of_a_task
from tests.steps.test_own_values import test_a_changed_global_recompiles
from tests.steps.test_reviewed import (
    test_branches_may_return_numbers_and_variables,
    test_no_gradient_flows_through_an_assignment,
    test_none_in_another_place_is_another_form,
)
from tests.steps.test_skipping import (
    test_a_skipped_step_is_as_if_its_batch_had_not_come,
    test_the_logs_of_a_skipped_step_are_nan,
)
