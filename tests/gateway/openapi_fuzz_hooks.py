"""What schemathesis cannot know, given to it by SCHEMATHESIS_HOOKS and run in its process: the model's name, and that
a message without calls has a content. Without them nearly every request would be refused before it is read further."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "default"
        for message in body["messages"] if isinstance(body.get("messages"), list) else ():
            if isinstance(message, dict) and message.get("content") is None:
                message["content"] = "hi"
    return body
