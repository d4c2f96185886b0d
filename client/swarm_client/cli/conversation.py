"""The conversation of an interactive chat: turns, the system prompt, and their file. Independent of the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from swarm.errors import UsageError


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    messages: list[_Turn]


@dataclass(slots=True)
class Conversation:
    model: str
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)  # (role, content)

    def messages(self, user: str = "") -> list[dict[str, str]]:
        """For the chat template: the system prompt, the turns so far, and `user` as the last one."""
        turns = [("system", self.system)] if self.system else []
        turns += [*self.turns, ("user", user)] if user else self.turns
        return [{"role": role, "content": content} for role, content in turns]

    def add(self, user: str, assistant: str) -> None:
        self.turns += [("user", user), ("assistant", assistant)]

    def take_back(self) -> str | None:
        """Forget the last prompt and its answer -> the prompt; None if there is none."""
        if [role for role, _ in self.turns[-2:]] != ["user", "assistant"]:
            return None
        (_, prompt), _ = self.turns[-2:]
        del self.turns[-2:]
        return prompt

    def reset(self) -> None:
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Raises UsageError."""
        file = _File(self.model, [_Turn(m["role"], m["content"]) for m in self.messages()])
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replaces the system prompt and the turns. On UsageError they are unchanged."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path} is not a saved conversation: {error}") from None
        turns = [(t.role, t.content) for t in file.messages]
        if any(role not in ("system", "user", "assistant") for role, _ in turns):
            raise UsageError(f"{path} has a turn that is neither the system's, the user's nor the assistant's")
        self.system = "\n".join(content for role, content in turns if role == "system")
        self.turns = [turn for turn in turns if turn[0] != "system"]
