"""How the scripts begin and end: signals while modules load, failures as one line and an exit code.

Imported before anything heavy, so it imports nothing heavy itself.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

# A path or a name that cannot be used; every other OSError is the disk's.
NAMED = {errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}
NAMED |= {errno.ENOENT, errno.EROFS, errno.EINVAL}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "array is too big")  # as PyTorch says it, mostly


def guard_loading(name: str) -> None:
    """To be called with a script's __name__ before its heavy imports, seconds in which nothing has begun: SIGINT and
    SIGTERM end it by one line. Its worker processes, which import it too, leave Ctrl-C to it."""
    if name == "__main__":
        handle_signals(leave)
    elif name == "__mp_main__":
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def handle_signals(handler: Callable) -> None:
    """SIGTERM goes to the handler, and SIGINT unless it is ignored, as in a shell's background."""
    signal.signal(signal.SIGTERM, handler)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def leave(number, frame):
    os.write(2, b"\ninterrupted before anything began\n")
    os._exit(130)  # no module that is half loaded is asked to clean up


def interrupt(number, frame):
    raise KeyboardInterrupt


def ending(name: str, main: Callable, argv, resume: str) -> int:
    """main(argv) with its failures as one line and an exit code. resume: what to do after an interruption."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
    try:
        main(argv)
    except SystemExit as stop:  # argparse's, or a string where what is measured is wrong
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print(f"\ninterrupted{resume}", file=sys.stderr)
        return 130
    except Exception as error:  # a bug keeps its traceback
        code = exit_code(error)
        if code is None:
            raise
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        return code
    return 0


def exit_code(error: Exception) -> int | None:
    """2: a value that cannot be used, 1: the disk failed. None: neither, a bug."""
    if isinstance(error, OSError):
        return 2 if error.errno in NAMED else 1
    return 2 if isinstance(error, ValueError | MemoryError | BrokenProcessPool) or is_memory(error) else None


def is_memory(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or is_memory(error):
        return f"out of memory ({text[:200]}); take fewer --row-tokens or --batch-rows"
    if isinstance(error, BrokenProcessPool):
        return "a worker process was killed, most likely for memory; free some, or take smaller files and shapes"
    return text
