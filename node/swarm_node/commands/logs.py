"""Logs on stderr: lines for people, or one JSON object a record for programs (`--log-format json`).

Owns the two forms. What a node tells whoever started it goes to stdout and is `report`'s.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """{"time": ISO 8601 in UTC, "level", "logger", "message"} and, if there is one, "error" with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start(verbose: bool, log_format: str = "text") -> None:
    """Log warnings, or with `verbose` also what happens, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler], force=True)
    if not verbose:
        logging.getLogger("swarm.net").setLevel(logging.CRITICAL)  # what matters of it reaches us as an exception
