# SPDX-License-Identifier: Apache-2.0
"""A script under the emulator finds the process as python itself would have left it; python is the oracle."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ipu_finetune import cli, emulator
from ipu_finetune.emulator import children
from ipu_finetune.emulator._install import _COMPANIONS, _PACKAGES
from ipu_finetune.emulator.script import command, run_script
from ipu_finetune.errors import TargetUnavailableError, UsageError

ROOT = Path(__file__).resolve().parents[2]

# Prints all that a script may ask about how it was started. The folder for child processes is ours alone.
PROBE = """
import os, pickle, sys
class Thing: pass
print(__name__, sys.argv, __package__, globals().get("__spec__") and __spec__.name, globals().get("__file__"))
print(globals().get("__cached__"), type(__loader__).__name__, __doc__)
print([path for path in sys.path if "for_children" not in path][0])
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Thing()))) is Thing)
"""


@pytest.fixture
def started(tmp_path, monkeypatch, capfd):
    """Return what a program prints, when python starts it and when we do."""
    monkeypatch.chdir(tmp_path)

    def run(*words, argv=()):
        kind, what = words if len(words) == 2 else ("", words[0])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        python = subprocess.run(
            [sys.executable, *words, *argv], capture_output=True, text=True, check=True, env=environment
        )
        capfd.readouterr()
        run_script(what, argv, kind)
        return python.stdout, capfd.readouterr().out

    return run


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def run(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, **options)


def test_a_script_is_started_as_by_python(tmp_path, started):
    write(tmp_path / "folder" / "probe.py", '"""Its text."""\n' + PROBE + "import neighbour\nprint(neighbour.HERE)\n")
    write(tmp_path / "folder" / "neighbour.py", "HERE = 3\n")
    python, ours = started("folder/probe.py", argv=["--help", "-m", "a b", "--debug"])
    assert ours == python
    assert "'folder/probe.py', '--help', '-m', 'a b', '--debug'" in ours


def test_a_linked_script_has_the_folder_of_the_file_itself(tmp_path, started):
    write(tmp_path / "real" / "probe.py", PROBE)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "probe.py")
    python, ours = started("link.py")
    assert ours == python
    assert str(tmp_path / "real") in ours


def test_a_module_is_started_as_by_python_with_relative_imports(tmp_path, started):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "other.py", "VALUE = 5\n")
    write(tmp_path / "package" / "train.py", PROBE + "from . import other\nprint(other.VALUE)\n")
    write(tmp_path / "package" / "__main__.py", PROBE + "from .other import VALUE\nprint(VALUE + 1)\n")
    for name in ("package.train", "package"):
        python, ours = started("-m", name, argv=["-c"])
        assert ours == python
    assert ours.endswith("6\n")


def test_code_and_a_folder_are_started_as_by_python(tmp_path, started):
    write(tmp_path / "app" / "__main__.py", PROBE)
    for words in (("app",), ("-c", PROBE)):
        python, ours = started(*words, argv=["x"])
        assert ours == python


def test_afterwards_the_process_is_as_before(tmp_path):
    script = write(
        tmp_path / "greedy.py",
        """
        import sys, poptorch
        sys.argv.append("more")
        sys.path.append("/nowhere")
        raise SystemExit(poptorch.__name__)
        """,
    )

    def state():
        return sys.argv[:], sys.path[:], os.environ.get("PYTHONPATH"), sys.modules["__main__"], emulator.is_installed()

    before = state()
    with pytest.raises(SystemExit, match=r"ipu_finetune\.emulator\.poptorch"):
        run_script(str(script))
    assert state() == before
    assert "poptorch" not in sys.modules


def test_the_global_names_of_a_script_are_returned(tmp_path):
    script = write(
        tmp_path / "training.py",
        """
        import sys
        import poptorch, torch

        class Scale(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = torch.nn.Parameter(torch.tensor(2.0))

            def forward(self, x):
                return poptorch.identity_loss(self.factor * x, "sum")

        model = Scale()
        training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])))
        loss = training(torch.tensor([1.0, 2.0]))
        """,
    )
    names = run_script(str(script), ["0.5"])
    assert names["loss"].item() == 6.0
    assert names["model"].factor.item() == pytest.approx(2.0 - 0.5 * 3.0)


def test_a_failing_script_ends_as_under_python_and_its_workers_are_emulated(tmp_path):
    script = write(
        tmp_path / "fails.py",
        """
        import atexit, multiprocessing, subprocess, sys
        import poptorch

        def work(queue):
            import poptorch
            queue.put((__name__, poptorch.__version__))

        def deep():
            {}["key"]

        if __name__ == "__main__":
            atexit.register(print, "at exit", sys.argv[1:])
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                worker = context.Process(target=work, args=(queue,))
                worker.start()
                print(method, *queue.get(), flush=True)
                worker.join()
            code = "import popdist.poptorch as ours; print('subprocess', ours.__name__)"
            subprocess.run([sys.executable, "-c", code], check=True)
            deep()
        """,
    )
    done = run("-m", "ipu_finetune.emulator", str(script), "--help", "--force", cwd=tmp_path)
    import ipu_finetune.emulator.poptorch as ours

    version = ours.__version__
    assert done.stdout.splitlines() == [
        f"spawn __mp_main__ {version}",
        f"forkserver __mp_main__ {version}",
        "subprocess ipu_finetune.emulator.popdist.poptorch",
        "at exit ['--help', '--force']",
    ]
    assert done.returncode == 1
    first, _, rest = done.stderr.partition("\n")
    assert first.startswith("emulated: ")
    assert [line.split(", ")[1:] for line in rest.splitlines() if line.startswith("  File")] == [
        ["line 23", "in <module>"],
        ["line 10", "in deep"],
    ]
    assert rest.endswith("\nKeyError: 'key'\n")
    assert "ipu_finetune" not in rest


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise SystemExit(True)", 1, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("import sys; sys.excepthook = lambda *_: print('mine', file=sys.stderr); 1 / 0", 1, "mine\n"),
    ],
)
def test_the_exit_code_is_the_scripts(ending, code, error, process_as_before, capsys):
    assert cli.main(["emulate", "-c", ending, "--debug"]) == code
    assert capsys.readouterr().err.partition("\n")[2].endswith(error)


@pytest.fixture
def process_as_before(monkeypatch):
    """`execute` leaves the process to the program; a test must take it back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("PYTHONPATH", "")
    yield
    emulator.uninstall()


def test_the_verb_gives_everything_after_the_script_to_it(tmp_path, process_as_before, capsys):
    script = write(tmp_path / "echo.py", "import sys; print(sys.argv[1:])")
    assert cli.main(["--debug", "emulate", str(script), "--help", "--debug", "--force", "-m", "x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "['--help', '--debug', '--force', '-m', 'x']\n"
    assert shown.err.startswith("emulated: poptorch is the emulator")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a SCRIPT"),
        (["-m"], "expected a MODULE after -m"),
        (["--hlp", "train.py"], "unknown option --hlp before SCRIPT"),
        (["train.py"], "can't open file 'train.py': no such file"),
        (["train"], r"can't open file 'train': no such file \('train\.py' exists\)"),
        (["empty"], "can't find '__main__' module in 'empty'"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if words == ["train"]:
        write(tmp_path / "train.py", "")
    with pytest.raises(UsageError, match=message):
        command(words, "emulate")
    assert cli.main(["emulate", *words]) == 2
    assert capsys.readouterr().err.startswith("ipu-finetune: ")
    assert not emulator.is_installed()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such.module", "No module named no_such.module"),
        ("json.tool.py", r"for a file, leave out -m, or give -m json\.tool"),
        ("curses", "'curses' is a package without a __main__ module"),
    ],
)
def test_a_module_that_is_not_there_is_wrong_usage(module, message):
    with pytest.raises(UsageError, match=message):
        run_script(module, kind="-m")
    assert not emulator.is_installed()


def test_a_real_poptorch_is_hidden_only_by_force(tmp_path, monkeypatch, process_as_before, capsys):
    write(tmp_path / "poptorch" / "__init__.py", "REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import poptorch; print(hasattr(poptorch, 'REAL'))"
    with pytest.raises(TargetUnavailableError, match="force"):
        run_script(code, kind="-c")
    assert cli.main(["emulate", "-c", code]) == 4
    assert cli.main(["emulate", "--force", "-c", code]) == 0
    assert capsys.readouterr().out == "False\n"


def test_children_find_every_package_that_is_emulated():
    found = {path.stem for path in children.FOLDER.glob("*.py")}
    assert found == {*_PACKAGES, *_COMPANIONS}


@pytest.mark.parametrize("real", [False, True])
def test_a_child_keeps_a_real_horovod(tmp_path, real):
    if real:
        write(tmp_path / "horovod" / "__init__.py", "")
        write(tmp_path / "horovod" / "torch.py", "")
    code = "import horovod.torch, poptorch; print(horovod.torch.__name__, poptorch.__name__)"
    paths = os.pathsep.join([str(children.FOLDER), str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    ours = "ipu_finetune.emulator."
    assert done.stdout.split() == ["horovod.torch" if real else f"{ours}horovod.torch", f"{ours}poptorch"], done.stderr


def test_help_answers_without_loading_torch():
    done = run("-X", "importtime", "-m", "ipu_finetune", "emulate", "--help", check=True)
    assert "usage: ipu-finetune emulate [--force] SCRIPT" in done.stdout
    assert "| torch" not in done.stderr.replace("  ", "")
