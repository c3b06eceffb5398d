"""Logs: structlog, one line an event, to standard error."""

import logging
import sys

import structlog


def set_up_logging(level: str) -> None:
    """Human lines on a terminal, JSON lines elsewhere; `level` as in settings.log_level."""
    interactive = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if interactive else "iso", utc=not interactive),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if interactive else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
