"""Say which tests `make test` leaves to `make test-full`: cross products, and slow whole runs.

Every guarantee keeps a test in `make test`. Of a test in `KEPT` the given number of its cases stay,
spread evenly over their order; 0: none stays, for what it proves is proved there by a smaller one.
`make check` runs the folders and files of `CHECKED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

CHECKED = (
    "unit/",
    "integration/test_handle.py",
    "integration/test_step_consistency.py",
    "integration/test_torn_windows.py",
    "integration/test_journal_entries.py",
    "distributed/test_attach.py",
    "distributed/test_restore.py",
    "e2e/test_failures.py",
)

KEPT = {
    "distributed/test_attach.py": {
        "test_every_step_is_committed_on_every_rank": 1,
    },
    "distributed/test_buckets.py": {
        "test_three_killed_ranks_go_on_with_the_sums_of_the_run_that_nothing_interrupts": 1,
        "test_of_the_first_step_rank_0_s_order_is_kept_before_ddp_has_told_the_others": 1,
        "test_what_is_computed_before_ddp_rebuilds_is_what_it_then_has": 2,
        "test_another_setting_of_ddp_is_left_alone_and_told": 2,
    },
    "distributed/test_closure_ranks.py": {
        "test_the_last_complete_step_is_there_on_every_rank": 1,
        "test_ranks_that_fail_inside_of_their_closures_go_on_bit_for_bit": 1,
    },
    "distributed/test_dtensor.py": {
        "test_the_parts_of_all_ranks_lie_where_they_say_in_the_whole": 4,
    },
    "distributed/test_death_behind_gradients.py": {
        "test_what_is_not_as_it_would_have_been_at_its_fence_is_not_taken_for_it": 1,
        "test_an_update_that_was_left_out_is_no_other_habit": 0,
        "test_an_iteration_against_habit_is_known_at_its_fence": 0,
        "test_it_is_there_too_where_that_update_is_left_out": 0,
        "test_the_step_that_its_peers_go_on_to_is_there_on_every_rank": 1,
    },
    "distributed/test_differing_ranks.py": {
        "test_one_flipped_bit_is_found_within_a_round_and_named_on_every_rank": 1,
        "test_optimizer_state_that_differs_is_named_with_what_it_makes_differ": 1,
    },
    "distributed/test_frozen_ranks.py": {
        "test_a_rank_that_stops_at_any_instant_costs_no_step": 0,
        "test_another_number_of_ranks_saves_whole_in_the_file_that_is_there": 0,
        "test_a_rank_that_stands_still_costs_no_step_that_another_has": 1,
        "test_a_rank_that_holds_python_s_lock_costs_no_step": 1,
        "test_one_healthy_rank_of_three_is_enough": 1,
        "test_a_rank_whose_disk_hangs_while_it_saves_costs_no_step": 1,
        "test_a_rank_of_an_earlier_life_that_wakes_changes_nothing": 1,
    },
    "distributed/test_fsdp.py": {
        "test_a_killed_job_goes_on_bit_for_bit_on_the_same_mesh": 1,
        "test_resharding_after_the_forward_or_not_makes_no_difference": 0,
        "test_a_rank_is_killed_at_any_moment_and_all_go_on_from_one_step": 0,
    },
    "distributed/test_fsdp_state.py": {
        "test_parts_that_are_not_of_one_whole_are_not_put_together": 2,
        "test_the_sharded_parameters_are_named_at_every_moment_of_a_step": 1,
    },
    "distributed/test_full_regions.py": {
        "test_a_failure_finds_a_slot_though_no_due_step_s_fate_is_known": 1,
    },
    "distributed/test_golden.py": {
        "test_ranks_that_are_killed_at_any_instant_go_on_as_if_nothing_had_happened": 1,
        "test_ddp_s_options_change_nothing_of_that": 1,
        "test_a_kill_between_the_first_update_and_the_schedule_leaves_the_schedule_to_the_loop": 0,
        "test_a_rank_that_stands_still_makes_others_wait_for_its_gradients_only": 0,
    },
    "distributed/test_gradients.py": {
        "test_the_module_is_as_it_was_after_detach": 0,
        "test_no_bit_of_a_gradient_changes": 2,
    },
    "distributed/test_hanging_ranks.py": {
        "test_who_waits_for_a_rank_that_hangs_behind_it_ends_after_it_with_the_step_saved_whole": 1,
        "test_a_rank_that_hangs_there_ends_at_sigterm_at_once_and_is_finished": 1,
    },
    "distributed/test_healed_jobs.py": {
        "test_a_killed_node_costs_one_minibatch_and_goes_on_exactly": 1,
        "test_a_second_failure_before_the_first_snapshot_is_healed_again": 1,
        "test_a_damaged_replica_is_mended_and_the_job_goes_on_exactly": 0,
    },
    "distributed/test_healing_faults.py": {
        "test_a_rank_that_dies_while_it_gives_is_named_on_every_other": 1,
    },
    "distributed/test_held_ranks.py": {
        "test_ranks_that_are_ended_have_saved_the_last_step_that_both_have_trained": 0,
    },
    "distributed/test_history_ranks.py": {
        "test_a_rank_that_copies_slowly_copies_the_same_steps": 0,
    },
    "distributed/test_in_place.py": {
        "test_sparse_gradients_are_reduced_again_and_never_given": 0,
        "test_a_rank_that_is_lost_in_any_phase_is_replaced_and_no_other": 0,
        "test_ranks_are_lost_one_after_the_other_and_only_they_are_replaced": 1,
        "test_a_rank_that_is_lost_in_the_last_step_is_replaced": 0,
        "test_a_rank_that_is_lost_in_an_evaluation_is_replaced": 0,
        "test_a_rank_is_replaced_whatever_the_training_does": 0,
        "test_a_replacement_s_modules_have_read_its_own_rank": 0,
        "test_connections_are_cut_and_nothing_is_replaced_or_lost": 1,
        "test_what_cannot_be_recovered_in_place_restarts_all_ranks_with_its_reason": 0,
        "test_a_rank_that_stands_is_ended_for_the_others_and_replaced": 0,
        "test_where_recovery_in_place_is_off_all_ranks_are_restarted": 0,
        "test_all_ranks_that_are_lost_at_once_are_restarted": 0,
        "test_a_job_without_restarts_left_fails_and_goes_on_when_it_is_started_again": 0,
        "test_a_rank_that_ends_early_with_status_0_is_not_waited_for": 0,
        "test_a_rank_of_one_of_two_nodes_is_replaced_by_its_node_s_agent": 0,
        "test_a_training_gives_the_bits_that_it_gives_under_torchrun": 0,
        "test_what_cannot_be_repeated_restarts_all_ranks_in_words_and_gives_the_same_bits": 0,
        "test_a_replacement_restores_of_another_run_what_the_first_life_did": 0,
    },
    "distributed/test_in_place_seams.py": {
        "test_a_worker_ends_as_python_does_though_nothing_is_destroyed": 1,
    },
    "distributed/test_interleavings.py": {
        "test_no_order_lets_a_difference_pass_or_trusts_what_follows_it": 1,
    },
    "distributed/test_just_in_time.py": {
        "test_ranks_that_have_saved_different_steps_before_any_was_whole_begin_anew": 0,
        "test_ranks_that_fail_at_one_place_go_on_bit_for_bit": 1,
    },
    "distributed/test_lost_after_healing.py": {
        "test_a_rank_healed_with_its_own_journal_keeps_its_older_snapshot": 0,
    },
    "distributed/test_peer_death.py": {
        "test_the_last_complete_step_is_there_on_every_rank": 1,
        "test_with_every_step_due_an_exact_snapshot_outlives_a_death_before_the_next_forward": 1,
        "test_what_a_survivor_takes_again_behind_its_update_does_not_hide_the_update": 1,
    },
    "distributed/test_policies_of_ranks.py": {
        "test_a_restarted_rank_0_goes_on_with_what_the_job_has_learned": 0,
        "test_a_symptom_on_another_rank_makes_a_step_due": 0,
        "test_a_best_metric_saves_the_evaluated_state_on_every_rank": 0,
        "test_a_step_that_was_announced_is_given_up_when_the_loss_is_no_number": 1,
        "test_another_number_of_ranks_goes_on_with_it_as_well": 0,
    },
    "distributed/test_resume.py": {
        "test_a_job_that_lost_a_rank_does_what_an_uninterrupted_one_does": 1,
        "test_a_region_from_a_backup_takes_the_job_back_and_on_again": 1,
        "test_what_another_world_needs_stays_until_it_has_a_whole_snapshot": 0,
        "test_another_number_of_ranks_goes_on_and_back_again": 1,
    },
    "distributed/test_sharded_ways.py": {
        "test_training_goes_on_bit_for_bit_however_it_is_sharded": 2,
    },
    "distributed/test_shared_jobs.py": {
        "test_each_rank_writes_its_part_and_together_they_hold_all": 1,
    },
    "distributed/test_shared_state_order.py": {
        "test_the_keys_of_shared_state_have_the_order_that_the_optimizer_made": 1,
    },
    "distributed/test_signalled_ranks.py": {
        "test_sigterm_to_ranks_inside_collectives_and_outside_saves_the_same_step_on_all": 1,
        "test_a_rank_that_waits_for_one_that_hangs_notices_and_both_save": 1,
        "test_an_exception_waits_for_a_rank_that_can_only_save_the_instant_before": 0,
        "test_a_rank_that_hears_of_another_s_signal_saves_as_well": 0,
    },
    "distributed/test_torchrun.py": {
        "test_a_job_that_torchrun_restarts_goes_on_as_if_nothing_had_happened": 0,
        "test_a_job_whose_torchrun_is_killed_goes_on_under_another": 0,
    },
    "distributed/test_traffic.py": {
        "test_the_timeline_shows_buckets_and_the_wait_for_them": 2,
    },
    "e2e/test_in_place_soak.py": {
        "test_ranks_killed_stopped_and_cut_at_random_moments_leave_no_trace": 0,
    },
    "e2e/test_back_end_kills.py": {
        "test_a_killed_training_resumes_bit_by_bit_on_memory": 0,
    },
    "e2e/test_bench.py": {
        "test_a_definition_runs_and_every_engine_is_verified": 1,
        "test_readme_s_picture_is_a_step_of_a_traced_run": 0,
        "test_the_command_trains_two_ranks_over_a_slow_network": 0,
        "test_the_command_runs_a_definition_in_processes_of_its_own": 0,
    },
    "e2e/test_bench_restart.py": {
        "test_a_killed_training_is_restarted_in_a_new_python": 0,
    },
    "e2e/test_chaos.py": {
        "test_under_lightck_run_the_report_says_which_ranks_were_replaced_alone": 0,
        "test_faults_of_several_kinds_and_phases_under_torchrun": 0,
        "test_each_kind_comes_once_and_the_end_is_the_undisturbed_one": 0,
        "test_just_in_time_snapshots_leave_a_minibatch_to_lose": 0,
        "test_rare_snapshots_lose_what_lies_between_them": 0,
        "test_a_network_drop_passes": 0,
        "test_what_a_training_forgets_shows_as_a_difference": 0,
        "test_a_command_with_a_place_of_its_own_is_refused": 0,
    },
    "e2e/test_closure_failures.py": {
        "test_an_exception_goes_on_bit_for_bit_from_the_last_complete_step": 1,
    },
    "e2e/test_gpu_check.py": {
        "test_without_a_gpu_it_says_so_and_does_nothing": 0,
        "test_every_engine_of_a_part_is_measured_and_verified": 1,
        "test_the_native_part_is_built_with_gcc_alone": 0,
    },
    "e2e/test_data.py": {
        "test_sampler_resumes_within_an_epoch_and_at_its_ends": 1,
        "test_stateful_loader_resumes_within_an_epoch_and_at_its_ends": 1,
        "test_epochs_that_are_left_early_and_batches_that_are_skipped_resume": 1,
        "test_accumulated_batches_resume_behind_the_last_of_the_step": 1,
        "test_epoch_of_a_stateful_loader_that_was_left_early_is_over": 1,
        "test_passes_of_another_loader_are_made_again_if_they_came_behind_the_draw": 1,
        "test_close_behind_an_epoch_of_a_stateful_loader_goes_on_with_the_next": 1,
    },
    "e2e/test_demo.py": {
        "test_the_demo_ends_equal_after_two_kills": 0,
    },
    "e2e/test_documents.py": {
        "test_the_blocks_of_readme_run_one_behind_the_other": 0,
        "test_the_blocks_of_a_guide_s_page_run_one_behind_the_other": 8,
        "test_a_framework_s_training_is_killed_and_goes_on_bit_for_bit": 0,
    },
    "e2e/test_examples.py": {
        "test_it_is_killed_and_goes_on_with_the_losses_of_a_run_that_nothing_ended": 0,
        "test_an_exception_between_the_update_and_the_schedule_loses_no_step": 0,
    },
    "e2e/test_extras.py": {
        "test_loader_with_a_position_resumes_in_the_middle_of_an_epoch": 1,
        "test_epoch_after_an_epoch_boundary_is_shuffled_as_before": 1,
        "test_the_loop_of_build_nanogpt_resumes": 0,
    },
    "e2e/test_ended_lives.py": {
        "test_the_end_of_a_life_is_known_to_the_next": 8,
    },
    "e2e/test_failures.py": {
        "test_a_training_that_an_exception_ends_goes_on_bit_for_bit_from_its_last_complete_step": 2,
    },
    "e2e/test_harness.py": {
        "test_comparison_notices_a_restore_that_is_wrong": 1,
        "test_plain_job_resumes_bit_for_bit_after_death_in_every_phase_of_every_step": 0,
    },
    "e2e/test_history_kills.py": {
        "test_killed_at_any_time_items_are_whole_or_absent_and_the_best_is_kept": 1,
    },
    "e2e/test_kills.py": {
        "test_of_two_trainers_one_owns_the_region_and_the_other_is_told": 0,
        "test_training_that_is_killed_at_any_instant_goes_on_as_if_it_were_not": 1,
    },
    "e2e/test_lifetime.py": {
        "test_death_at_any_moment_resumes_bit_for_bit": 0,
        "test_interpreter_that_exits_without_close_keeps_what_was_open": 0,
        "test_attach_after_training_began_captures_what_there_is": 0,
        "test_every_setting_resumes_bit_for_bit": 1,
        "test_region_on_an_ordinary_file_resumes": 1,
        "test_job_that_dies_again_and_again_ends_as_if_it_had_never_died": 0,
        "test_forked_child_writes_nothing_and_leaves_the_region_whole": 1,
    },
    "e2e/test_lightning.py": {
        "test_an_exception_inside_of_its_closure_goes_on_bit_for_bit": 1,
        "test_sigterm_inside_of_its_closure_goes_on_bit_for_bit": 0,
    },
    "e2e/test_loops.py": {
        "test_compiled_model_resumes": 0,
        "test_compiled_step_resumes": 1,
        "test_what_follows_a_step_belongs_to_its_snapshot_in_any_order": 1,
        "test_step_that_the_gradient_scaler_leaves_out_counts_and_resumes": 1,
        "test_loop_that_calls_the_parts_of_a_model_resumes": 0,
        "test_train_and_eval_flips_resume": 1,
        "test_activation_checkpointing_resumes": 0,
        "test_generators_stand_at_the_forward_as_they_did_then": 0,
    },
    "e2e/test_optimizers.py": {
        "test_optimizer_resumes_bit_for_bit": 2,
    },
    "e2e/test_package.py": {
        "test_a_wheel_of_an_sdist_has_all_and_its_library_loads": 0,
    },
    "e2e/test_readme.py": {
        "test_it_trains_is_killed_and_goes_on_with_the_losses_of_a_run_without_an_end": 0,
        "test_chaos_finds_it_identical_as_readme_says": 0,
    },
    "e2e/test_replaced.py": {
        "test_a_run_whose_state_was_replaced_resumes_after_it": 2,
    },
    "e2e/test_tensors.py": {
        "test_ten_thousand_tensors_with_their_state_resume": 0,
        "test_write_through_numpy_into_a_frozen_tensor_is_captured": 0,
        "test_tied_weights_stay_tied_and_resume": 0,
        "test_parameters_that_get_gradients_late_or_never_resume": 1,
    },
    "e2e/test_update_order.py": {
        "test_parameters_that_thaw_resume": 1,
        "test_group_that_is_added_while_training_resumes": 1,
        "test_gan_whose_optimizers_are_found_resumes": 1,
        "test_gan_with_disjoint_models_resumes_in_both_orders": 1,
        "test_gan_with_a_shared_trunk_resumes_in_both_orders": 1,
        "test_optimizer_around_another_one_counts_once": 0,
        "test_optimizers_that_step_in_backward_are_found": 0,
    },
    "e2e/test_users_loops.py": {
        "test_accelerates_loop": 1,
        "test_nanogpts_loop_with_its_batches_prefetched": 1,
        "test_plain_loop_with_a_resumable_sampler": 1,
    },
    "gpu/test_gpu_faults.py": {
        "test_after_an_error_that_stays_nothing_is_saved": 1,
    },
    "gpu/test_gpu_in_place.py": {
        "test_a_rank_that_is_killed_leaves_the_losses_of_a_run_that_nothing_ended": 1,
    },
    "gpu/test_gpu_ordering.py": {
        "test_every_snapshot_is_of_one_step": 6,
    },
    "gpu/test_gpu_resume.py": {
        "test_a_compiled_model_resumes": 1,
        "test_every_form_of_an_optimizer_resumes": 4,
    },
    "integration/test_back_ends.py": {
        "test_a_kill_inside_a_snapshot_leaves_the_older_one": 3,
    },
    "integration/test_bad_regions.py": {
        "test_a_truncated_region_is_refused_with_its_sizes": 8,
        "test_another_format_version_is_named_with_the_one_this_release_reads": 4,
    },
    "integration/test_bit_flips.py": {
        "test_a_bit_of_the_older_snapshot_never_hides_the_newest": 2,
        "test_a_bit_of_the_newest_snapshot_costs_that_one_and_says_so": 1,
        "test_every_bit_of_a_superblock_is_spare": 0,
        "test_what_is_read_after_a_flip_in_one_bit_of_a_word_is_caught_in_every_bit_of_it": 0,
    },
    "integration/test_crash_images.py": {
        "test_every_image_gives_back_a_step_of_the_run": 1,
        "test_a_mistake_in_the_commit_order_would_be_seen": 0,
    },
    "integration/test_journal_entries.py": {
        "test_a_change_is_in_the_very_next_entry": 40,
    },
    "integration/test_journal_extras.py": {
        "test_a_change_of_what_is_kept_apart_is_in_the_very_next_entry": 6,
    },
    "integration/test_media_faults.py": {
        "test_a_foreign_fault_still_ends_the_process_with_its_traceback": 1,
        "test_poison_at_any_access_of_a_training_is_told_and_costs_no_older_snapshot": 2,
        "test_the_native_programs_fail_every_call_and_access_and_live": 0,
    },
    "integration/test_ownership.py": {
        "test_an_interpreter_that_exits_without_close_keeps_what_was_open": 1,
    },
    "integration/test_rescue_ways.py": {
        "test_an_end_without_close_saves_the_last_step_and_earlier_hooks_run": 1,
    },
    "integration/test_signalled_training.py": {
        "test_sigterm_loses_no_more_than_the_minibatch_that_was_running": 2,
        "test_both_signals_at_once_save_the_step_and_the_more_final_one_ends_the_process": 2,
        "test_sigint_interrupts_the_main_thread_when_the_step_is_saved": 2,
        "test_sigterm_while_training_goes_on_saves_a_step_that_is_golden": 2,
    },
    "integration/test_store.py": {
        "test_a_killed_process_leaves_the_last_one_that_it_was_told_of_or_a_newer": 1,
    },
    "integration/test_streamed.py": {
        "test_what_is_changed_behind_the_update_is_part_of_the_snapshot": 9,
        "test_what_the_update_wrote_is_what_stood_at_forward_start": 5,
    },
    "unit/test_bench_compare.py": {
        "test_another_native_abi_is_measured_by_its_own_benchmarks_and_that_is_told": 0,
        "test_benchmarks_can_be_chosen": 0,
        "test_what_fails_in_one_tree_is_told_and_the_rest_is_compared": 0,
        "test_nothing_is_left_of_a_comparison_that_was_interrupted": 0,
    },
    "unit/test_bench_models.py": {
        "test_sizes_and_numbers_are_those_of_the_labels": 0,
        "test_a_state_s_size_is_known_before_there_is_one": 4,
    },
    "unit/test_bench_policies.py": {
        "test_auto_wastes_little_more_than_the_best_interval_in_hindsight": 1,
        "test_an_announced_failure_loses_less_and_false_alarms_cost_little": 2,
    },
    "unit/test_bench_page.py": {
        "test_charts_cope_with_rows_that_are_not_there_yet": 0,
        "test_report_page_and_charts_of_stored_files_are_the_same_byte_for_byte": 0,
    },
    "unit/test_in_place_simulated.py": {
        "test_a_rank_that_is_lost_at_any_point_is_replaced_without_a_trace": 14,
        "test_whatever_is_lost_at_random_every_result_is_the_same": 12,
    },
    "unit/test_in_place_spare.py": {
        "test_a_module_that_reads_the_rank_while_it_is_imported_reads_its_own": 0,
    },
    "unit/test_in_place_kept.py": {
        "test_of_a_long_evaluation_a_bounded_part_is_kept_and_two_steps_later_it_is_over": 1,
    },
    "unit/test_lazy_import.py": {
        "test_restore_and_load_are_functions_whoever_imports_their_modules": 1,
        "test_under_chaos_restore_is_disturbed_whichever_name_comes_first": 0,
    },
    "unit/test_plan.py": {
        "test_a_picture_is_drawn_and_not_replaced_without_force": 1,
    },
    "unit/test_region_model.py": {
        "test_any_sequence_of_operations_keeps_the_newest_and_invents_nothing": 5,
    },
    "unit/test_simulation.py": {
        "test_a_fixed_interval_loses_what_the_exact_formula_says": 1,
        "test_what_is_learned_does_not_depend_on_leaps": 3,
    },
    "unit/test_update_bits.py": {
        "test_updates_run_on_the_threads_that_torch_s_kernels_run_on": 1,
    },
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark what `make test` leaves out as `full`."""
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        cases[file.removeprefix("tests/"), name.partition("[")[0]].append(item)
    for file, tests in KEPT.items():
        for name, kept in tests.items():
            every = cases.get((file, name), [])
            chosen = {i * len(every) // kept for i in range(kept)} if kept else set()
            for i, item in enumerate(every):
                if i not in chosen:
                    item.add_marker(pytest.mark.full)
