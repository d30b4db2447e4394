"""The logger "trunkline", with a child for each component, and what TRUNKLINE_LOG makes of it.

The library's records come here by `_core.install_log`. Where TRUNKLINE_LOG is set, they are printed to stderr
unless the application has configured logging itself; otherwise nothing is printed.
"""

import logging
import sys
import time

from trunkline import _core
from trunkline._fork_gate import ForkGate

_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)  # by the library's numbers
_NAMES = {logging.ERROR: "error", logging.WARNING: "warn", logging.INFO: "info", logging.DEBUG: "debug"}
_COMPONENTS = tuple(_core.log_components())
_ROOT = logging.getLogger("trunkline")
_LOGGERS = {name: _ROOT.getChild(name) for name in _COMPONENTS}
_handling = ForkGate()  # while handlers of the user run in the thread that delivers records


class Log:
    """Logs for one component. A record that its logger does not want is not formatted.

    Records are delivered like those of the library itself, by a thread: the caller waits for no lock of
    logging, which a thread may hold that a signal handler interrupted.
    """

    def __init__(self, component: str) -> None:
        """`component`: "checkpoint", "transformers", ..."""
        self._component = component
        self._logger = _LOGGERS[component]

    def warn(self, text: str, *arguments: object) -> None:
        """Log what the user should act on. `arguments` are for the placeholders of `text`, as in logging."""
        self._write(logging.WARNING, text, arguments)

    def info(self, text: str, *arguments: object) -> None:
        """Log what was chosen, and why."""
        self._write(logging.INFO, text, arguments)

    def debug(self, text: str, *arguments: object) -> None:
        """Log a detail."""
        self._write(logging.DEBUG, text, arguments)

    def _write(self, level: int, text: str, arguments: tuple[object, ...]) -> None:
        number = _LEVELS.index(level)
        if number <= _level_of(self._logger):
            message = text % arguments if arguments else text
            _core.log(number, self._component, message.encode(errors="backslashreplace"))


class _Formatter(logging.Formatter):
    """As the library itself writes records (src/base/log.cpp)."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        level = _NAMES.get(record.levelno, record.levelname.lower())
        component = record.name.partition(".")[2] or record.name
        return (
            f"{when}.{int(record.created * 1000) % 1000:03} {level:<5} {component} [{record.threadName}] "
            f"{record.getMessage()}"
        )


class _StderrHandler(logging.Handler):
    """Prints records of the components that TRUNKLINE_LOG names, unless another handler gets them."""

    def __init__(self, components: set[str]) -> None:
        super().__init__()
        self._names = {_LOGGERS[component].name for component in components}
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        if record.name not in self._names or sys.stderr is None or self._is_handled_elsewhere(record.name):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _is_handled_elsewhere(self, name: str) -> bool:
        """Whether the application has configured logging, by now: it may do so after importing this."""
        each: logging.Logger | None = logging.getLogger(name)
        while each is not None:
            if any(handler is not self and handler is not _NOTHING for handler in each.handlers):
                return True
            each = each.parent if each.propagate else None
        return False


_NOTHING = logging.NullHandler()


def _handle(level: int, component: str, created: float, thread: bytes, message: bytes) -> None:
    """Hand a record of the library to its logger."""
    target = _LOGGERS[component]
    number = _LEVELS[level]
    if not target.isEnabledFor(number):
        return
    text = message.decode(errors="backslashreplace")
    record = target.makeRecord(target.name, number, "(trunkline)", 0, text, (), None)
    record.created = created
    record.msecs = created * 1000 % 1000
    record.threadName = thread.decode(errors="backslashreplace")
    with _handling:
        target.handle(record)


def _levels() -> list[int]:
    """Return the library's number of the level that is wanted of each component; -1 for none."""
    return [_level_of(target) for target in _LOGGERS.values()]


def _level_of(target: logging.Logger) -> int:
    """As isEnabledFor() decides, without the lock of logging.

    That may be held by a thread which a signal handler interrupted, and which waits for this one.
    """
    if target.disabled:
        return -1
    least = max(target.getEffectiveLevel(), target.manager.disable + 1)
    return max((number for number, level in enumerate(_LEVELS) if level >= least), default=-1)


def configure() -> None:
    """Connect the library's records with logging. Called once, when the package is imported."""
    _ROOT.addHandler(_NOTHING)
    levels = _core.log_levels_from_environment()
    if levels is not None:
        wanted = {
            component: level for component, level in zip(_COMPONENTS, levels, strict=True) if level >= 0
        }
        for component, level in wanted.items():
            _LOGGERS[component].setLevel(_LEVELS[level])
        _ROOT.addHandler(_StderrHandler(set(wanted)))
    _core.install_log(_handle, _levels)
