"""Errors whose remedies a test of real processes carries out, each with its file and its test."""

SIGNALS = "distributed/test_interrupted_preparation.py"
FAULTS = "distributed/test_faults_of_ranks.py"
PROCESSES = {
    "techniques/stability/spike_rewind:SpikeWatch._gives_up#1": (
        "techniques/test_spike_rewind.py",
        "test_it_gives_up_with_one_error",
    ),
    "train/interrupts:Interrupts._caught#1": (
        SIGNALS,
        "test_a_signal_is_one_message_and_the_same_command_starts_again",
    ),
    "train/interrupts:Interrupts._cut_off#1": (
        "cli/test_cut_off.py",
        "test_a_run_that_is_cut_off_in_a_compiler_goes_on_as_it_is_told",
    ),
    "parallel/first:_wait#1": (
        SIGNALS,
        "test_a_signal_is_one_message_and_the_same_command_starts_again",
    ),
    "parallel/world:open_world#1": (
        "distributed/test_remedies_of_ranks.py",
        "test_another_number_of_processes_than_the_mesh_has",
    ),
    "train/others:_heard#1": (FAULTS, "test_a_rank_that_ends_is_named_with_its_reason"),
    "train/others:_heard#2": (FAULTS, "test_a_rank_that_ends_is_named_with_its_reason"),
    "train/others:heartbeats.end#1": (
        FAULTS,
        "test_a_rank_that_holds_up_the_others_is_named_and_the_run_ends",
    ),
    "train/replicas:Comparison.__init__#1": (FAULTS, "test_what_no_rank_has_twice_is_refused"),
    "train/replicas:Comparison._differ#1": (FAULTS, "test_a_bit_that_flips_is_named_with_its_rank"),
    "tuner/command:tune_command#1": (
        "tuner/test_tune.py",
        "test_an_interruption_keeps_the_files_and_a_second_call_measures_nothing_twice",
    ),
}
"""By the site of the error."""
