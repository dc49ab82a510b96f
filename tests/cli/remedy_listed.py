"""Errors that print no remedy, by module, each with the reason: all others are run as printed."""

UNTIMED = "said inside of a prediction that goes on without a time: nothing can be typed"

SCALE = "tests/data/scale kills and damages it, and carries its remedy out"

EDGE = "tests/export/test_edge.py meets it, where the runtime is installed: a whole file of nothing"

FOREIGN = "tests/migrate meets it: only another file, or another value in it, mends it"

LISTED = {
    "migrate/": FOREIGN,
    "ui/": "tests/ui meets each: a page says it, with the remedy as a command to copy",
    "cli/ui": "tests/ui/test_ui_safety.py meets each: what follows serves until Ctrl-C",
    "report/growing": "tests/ui/test_ui_pages.py meets them: a page of `headrace ui` says it",
    "tuner/recorded": "tests/ui/test_ui_pages.py meets them: a page of `headrace ui` says it",
    "core/errors:interpreting#1": "tests/security/test_readers.py spoils tables, and only one "
    "that is not spoiled mends it",
    "doctor/run:place_of#1": "said inside of a verdict that goes on without the device's rates",
    "launch/": "tests/launch meets each and reads its remedy: what follows is an engine's",
    "cli/launch": "tests/launch/test_local.py meets it: what follows becomes another process",
    "data/scale/local": SCALE,
    "cli/called": "tests/api/test_calls.py: the error of a verb, whose own remedy it has",
    "train/run_folder:RunFolder.read_report#1": "tests/doctor/test_so_far.py meets it: a caller in "
    "Python asks for the report, and verbs judge what the run has written so far",
    "train/memory_copies:_own_folder#1": "tests/distributed/test_memory_copies.py meets it: only a "
    "system without files in memory has it",
    "core/system": "tests/core/test_system.py pretends to be Windows, where WSL is installed",
    "parallel/micro_pipeline:share_memory#1": "only GPUs that cannot read each other's memory have "
    "it; tests/parallel/test_micro_pipeline.py pretends so",
    "predict/mesh:choose_mesh#1": "tests/predict/test_mesh_chosen.py: only more GPUs mend it",
    "data/remote": "tests/data/test_remote.py asks a store in memory, and reads each remedy",
    "data/scale/job": SCALE,
    "data/scale/sealed": SCALE,
    "data/quality/decontaminate:Decontaminator.merge#1": SCALE,
    "data/scale/slurm:SlurmArray.run#2": SCALE,
    "costs/host:_seconds#1": UNTIMED,
    "costs/host:_seconds#2": UNTIMED,
    "costs/host:_attention_s#1": UNTIMED,
    "costs/host:_attention_s#2": UNTIMED,
    "costs/work:Work.seconds#1": UNTIMED,
    "data/teacher_shards": "tests/techniques/test_distillation.py fills a disk, damages a part "
    "and changes the tokens of a row",
    "export/llama_cpp:LlamaCpp._ask#1": "the server of llama.cpp refuses what was checked before",
    "export/edge_runtime:OnnxRuntime._open#1": EDGE,
    "export/edge_runtime:Executorch._open#1": EDGE,
    "export/vision:ImagesRuntime.__init__#1": "a file whose digest is right and that its runtime "
    "does not load, as of a later version of it",
    "cli/chain:Chain._of_file#1": "the error of a file that is measured, with its own remedy",
    "cli/chain:Chain._of_file#2": "the process that measures a file is killed",
    "export/measured:_check_tokens#1": "tests/export/test_measured.py meets it: only the model "
    "that a file was made of mends it",
    "export/measured:_Loss.bits_per_byte#1": "rows of a validation text that stand for no byte",
    "export/compressed_tensors:PackedExport.check#1": "tests/export/test_compressed_tensors.py "
    "meets it, of a model of GPT-2",
    "export/vision:_with_codes#1": "a later writer of ONNX files may name weights otherwise",
    "export/cached:attending_by#1": "tests/export/test_cached.py meets it, of weights of others",
    "assemble/references:References.make#1": "a file of how likely answers were before a run is "
    "gone or has changed: no command knows what was in it",
    "techniques/adapt/qlora:Qlora.apply#1": "tests/techniques/test_qlora.py meets it, of weights "
    "whose shape is not in the plan",
    "techniques/adapt/qlora:Qlora.apply#2": "tests/techniques/test_qlora.py meets it before, of a "
    "plan with its shape",
    "techniques/precision/weight_pruning:WeightPruning.apply#1": "tests/techniques/"
    "test_weight_pruning.py meets it, of weights whose shape is not in the plan",
    "assemble/references:_Reading._write#1": "tests/techniques/test_preference.py meets it",
}
"""Modules, rooms that end with a slash, or sites of which some errors are no case of a table."""
BARE = {
    "core/files": "the message names the line and the column of a TOML file",
    "costs/host": "said inside of a prediction that goes on without",
    "costs/work": "said inside of a prediction that goes on without",
    "costs/machine": "said inside of a prediction that goes on without",
    "data/": "the message names the file and the line that are to be mended",
    "export/llama_cpp": "the message is the runtime's own, and nobody knows what mends it",
    "core/errors": "the remedy is made with the error",
    "assemble/build": "the session adds what learns to a step that is not finite",
}
"""Where an error may have no remedy, and why."""
