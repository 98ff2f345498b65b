"""The table of commands, and what becomes of arguments that no command knows."""

import pytest

from vllm_hicache import __version__
from vllm_hicache.cli import COMMANDS, main
from vllm_hicache.cli_bench import BENCHMARKS


def test_every_command_has_a_help(capsys):
    names = [module.__name__.rpartition("cli_")[2] for module in COMMANDS]
    assert "doctor" in names
    for name in names:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"hicache {name}" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hicache {__version__}\n"


@pytest.mark.parametrize("arguments", [["storage", "status", "--dtype", "half"], ["--what"]])
def test_unknown_arguments_are_refused_where_they_do_not_go_to_vllm(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "hicache" in capsys.readouterr().err


def test_every_benchmark_of_the_command_has_a_help_with_its_options(capsys):
    assert BENCHMARKS.keys() == {"restore", "multiturn", "trace", "interference", "storage"}
    for name in BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            main(["bench", name, "--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert f"usage: hicache bench {name}" in printed
        assert "--out" in printed
        assert "--dry-run" in printed


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["trace"], ["multiturn", "--what", "1"]])
def test_wrong_arguments_of_a_benchmark_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert "usage: hicache bench" in capsys.readouterr().err
