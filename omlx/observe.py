"""Logs: structlog, one line an event, to standard error."""

import asyncio
import logging
import sys
from typing import TypeVar

import structlog

T = TypeVar("T")


def watched(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """A task that is to run until it is cancelled: it does not end without a word."""
    task.add_done_callback(_tell_end)
    return task


def _tell_end(task: asyncio.Task[T]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        structlog.get_logger().error("a task ended that should not", task=task.get_name(), exc_info=error)


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
