"""What a row says of the command that made it."""

import receipts


def test_a_command_names_no_folder_of_one_machine() -> None:
    words = "benchmarks/x.py search --data /a/b --runs 3 --work /tmp/w --results /tmp/r --seeds 2"
    said = receipts.command(words.split())
    assert said == "python benchmarks/x.py search --data DIR --runs 3 --seeds 2"
