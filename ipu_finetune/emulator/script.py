# SPDX-License-Identifier: Apache-2.0
"""Running an unmodified script or module on the emulator, as if python had started it.

A script may look at `sys.argv`, `__file__` and `sys.path[0]`, pickle what it defines in `__main__`, start workers that
import it again, and leave with any exit code. It finds all of that as python would have left it.
"""

import importlib.util
import io
import os
import sys
from contextlib import ExitStack
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from .. import __version__
from ..errors import UsageError
from . import children, install, is_installed, uninstall

__all__ = ["command", "execute", "run_script"]

_INTERRUPTED = 130

_USAGE = """\
usage: {prog} [--force] SCRIPT [ARGUMENT ...]
       {prog} [--force] -m MODULE [ARGUMENT ...]
       {prog} [--force] -c CODE [ARGUMENT ...]

Run an unmodified script that uses poptorch, popart or popdist on the emulated IPU, as if python had started it.

positional arguments:
  SCRIPT       a script, or a folder with a __main__.py
  ARGUMENT     the script's own arguments: everything after SCRIPT, --help included

options:
  -m MODULE    run a module or package, as python -m does
  -c CODE      run Python code, as python -c does
  --force      hide a real PopTorch that is installed
  -h, --help   show this help

IPU_FINETUNE_EMULATED_HARDWARE says which IPU the emulator claims to be: 2 (the default), 21 for Bow, 1, or 0 for none.
"""


class _Program(NamedTuple):
    """What is to be run, and what python would say about it."""

    argv0: str
    path0: str
    attributes: Dict[str, Any]
    code: Callable[[], CodeType]


def _script(name: str) -> _Program:
    if os.path.isdir(name):
        return _folder(name)
    if not os.path.isfile(name):
        hint = f" ('{name}.py' exists)" if os.path.isfile(f"{name}.py") else ""
        raise UsageError(f"can't open file '{name}': no such file{hint}; give a script, -m MODULE or -c CODE")
    file = _full(name)
    attributes: Dict[str, Any] = {"__file__": file, "__spec__": None, "__package__": None, "__cached__": None}
    # The folder of the file itself, where the name is a link to it.
    path0 = os.path.dirname(os.path.realpath(name))
    if name.endswith(".pyc"):
        compiled: Any = SourcelessFileLoader("__main__", file)
        return _Program(name, path0, {**attributes, "__loader__": compiled}, lambda: compiled.get_code("__main__"))

    def code() -> CodeType:
        with io.open_code(file) as source:
            return compile(source.read(), file, "exec", dont_inherit=True)

    return _Program(name, path0, {**attributes, "__loader__": SourceFileLoader("__main__", file)}, code)


def _full(path: str) -> str:
    # Before 3.9, python took a path as it was given.
    return os.path.abspath(path) if sys.version_info >= (3, 9) else path


def _folder(name: str) -> _Program:
    spec = PathFinder.find_spec("__main__", [_full(name)])
    if spec is None or spec.loader is None:
        raise UsageError(f"can't find '__main__' module in '{name}'; give a script in it, or -m for a package")
    return _of_spec(spec)._replace(argv0=name, path0=_full(name))


def _module(name: str) -> _Program:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise UsageError(f"'{name}' is a package without a __main__ module, so it cannot be run by -m")
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise
        spec = None
    if spec is None or spec.loader is None:
        hint = f"; for a file, leave out -m, or give -m {name[:-3]}" if name.endswith(".py") else ""
        raise UsageError(f"No module named {name}{hint}")
    return _of_spec(spec)


def _of_spec(spec: ModuleSpec) -> _Program:
    loader: Any = spec.loader
    attributes = {
        "__file__": spec.origin,
        "__spec__": spec,
        "__package__": spec.parent,
        "__cached__": spec.cached,
        "__loader__": loader,
    }
    return _Program(str(spec.origin), os.getcwd(), attributes, lambda: loader.get_code(spec.name))


def _text(code: str) -> _Program:
    attributes = {"__spec__": None, "__package__": None, "__loader__": BuiltinImporter}
    return _Program("-c", "", attributes, lambda: compile(code, "<string>", "exec", dont_inherit=True))


_KINDS: Dict[str, Callable[[str], _Program]] = {"": _script, "-m": _module, "-c": _text}


def _start(what: str, argv: Sequence[str], kind: str, force: bool, undo: ExitStack) -> Callable[[], Dict[str, Any]]:
    """Make the process the program's; return what runs it. `undo` gets what puts each thing back."""
    if kind == "":
        program = _KINDS[kind](what)  # a missing file is told before anything is imported
    if not is_installed():
        install(force)
        undo.callback(uninstall)
    print(
        f"emulated: poptorch is the emulator of ipu-finetune {__version__}; nothing runs on an IPU",
        file=sys.stderr,
        flush=True,
    )
    undo.callback(sys.path.__setitem__, slice(None), list(sys.path))
    undo.callback(children.show_to_children())
    if kind != "":
        _put_first(os.getcwd() if kind == "-m" else "")
        program = _KINDS[kind](what)  # imports the packages that the module is in
    else:
        _put_first(program.path0)
    undo.callback(setattr, sys, "argv", sys.argv)
    sys.argv = [program.argv0, *argv]
    main = ModuleType("__main__")
    main.__dict__.update(program.attributes, __builtins__=sys.modules["builtins"])
    undo.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
    sys.modules["__main__"] = main

    def run() -> Dict[str, Any]:
        exec(program.code(), main.__dict__)
        return main.__dict__

    return run


def _put_first(folder: str) -> None:
    # Under `python -P` no program's folder is on the path.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def run_script(what: str, argv: Sequence[str] = (), kind: str = "", force: bool = False) -> Dict[str, Any]:
    """Run a program on the emulator within this process, and put the process back as it was.

    Args:
        what: a script's path, or a folder with a `__main__.py`; with `kind`, a module's name or Python code.
        argv: the program's arguments, without its name.
        kind: `""` for a script, `"-m"` for a module, `"-c"` for code.
        force: hide a real PopTorch.

    Returns:
        The program's global names.

    Raises:
        UsageError: there is no such script or module.
        TargetUnavailableError: a real PopTorch is here and `force` is False.
        SystemExit: the program left by it; its other exceptions come through too.
    """
    with ExitStack() as undo:
        return _start(what, argv, kind, force, undo)()


def execute(what: str, argv: Sequence[str] = (), kind: str = "", force: bool = False) -> int:
    """Run a program as the rest of this process, report its end as python does, and return its exit code.

    Nothing is put back: what the program leaves to be run at exit finds its world as it was. For the arguments and what
    is raised before the program starts, see `run_script`.
    """
    _drop_own_path()
    run = _start(what, argv, kind, force, _never)
    try:
        run()
    except SystemExit as leaving:
        return _exit_code(leaving.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        # The hook that prints takes the traceback from the exception.
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


_never = ExitStack()


def _drop_own_path() -> None:
    """Take away what python put first on `sys.path` for the command that is running."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        own = os.getcwd()
    else:
        own = os.path.dirname(os.path.realpath(file)) if file else ""
    if sys.path[:1] == [own]:
        del sys.path[0]


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    print(code, file=sys.stderr)
    return 1


def command(words: List[str], prog: str) -> int:
    """Run the command line of `{prog} [--force] SCRIPT ARGUMENT...` and return its exit code.

    Raises:
        UsageError: no program is named, or it is not there.
        TargetUnavailableError: a real PopTorch is here and `--force` was not given.
    """
    force = False
    for position, word in enumerate(words):
        if word in ("-h", "--help"):
            print(_USAGE.format(prog=prog), end="")
            return 0
        if word == "--force":
            force = True
        elif word[:2] in ("-m", "-c"):
            return _execute_named(word[:2], [word[2:]] * (len(word) > 2) + words[position + 1 :], force, prog)
        elif word == "--":
            return _execute_named("", words[position + 1 :], force, prog)
        elif word.startswith("-"):
            raise UsageError(f"unknown option {word} before SCRIPT; the script's own follow it; see {prog} --help")
        else:
            return _execute_named("", words[position:], force, prog)
    return _execute_named("", [], force, prog)


def _execute_named(kind: str, rest: List[str], force: bool, prog: str) -> int:
    if not rest:
        missing: Optional[str] = {"-m": "a MODULE after -m", "-c": "CODE after -c"}.get(kind, "a SCRIPT")
        raise UsageError(f"expected {missing}; see {prog} --help")
    return execute(rest[0], rest[1:], kind, force)
