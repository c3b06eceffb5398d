"""Logs: structlog, one line an event, to standard error."""

import logging
import sys

import structlog


def _rendering(interactive: bool) -> tuple[structlog.typing.Processor, ...]:
    # Plain tracebacks: the pretty ones print local variables, and with them people's prompts.
    if interactive:
        return (structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),)
    return structlog.processors.format_exc_info, structlog.processors.JSONRenderer()


def set_up_logging(level: str) -> None:
    """Human lines on a terminal, JSON lines elsewhere; `level` as in settings.log_level."""
    interactive = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if interactive else "iso", utc=not interactive),
            *_rendering(interactive),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
