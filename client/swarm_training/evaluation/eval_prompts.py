"""Held-out prompts for evaluation, written by people, of the kinds that matter for drafting."""

from __future__ import annotations

_FERRY = (
    "The ferry Marigold left Port Ellis at 7:40 on Tuesday with 112 passengers and nine crew. Off Gull Rock the engine "
    "lost power, and Captain Ruth Aldous dropped anchor in forty metres of water. The tug Brave Annie reached her at "
    "10:15 and towed her back to harbour. Nobody was hurt. The owner, Sund Lines, will refund every ticket and has "
    "ordered a new fuel pump."
)
_MEETING = (
    "hi all, so the meeting was ok i guess. we talked about the new website and tom said its late because the pictures "
    "are not there yet. sara will ask the photographer on monday. also the budget is gone, we have only 300 left. next "
    "meeting is on the 14th at 3 in the small room, please bring your numbers."
)
_BEES = (
    "Honeybees tell each other where food is by dancing. A bee that has found flowers returns to the dark hive and "
    "runs in a figure of eight on the comb. The angle of the straight part to the vertical is the angle of the flowers "
    "to the sun, and the longer she waggles, the farther away they are. Other bees follow her closely, feel the dance "
    "with their antennae and fly off in the right direction."
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "prose": (
        "Why do the leaves of many trees turn red in autumn?",
        "Describe an evening in a small harbour town.",
        "What should I think about before I get a dog?",
    ),
    "summary": (
        f"Summarize this in two sentences:\n{_FERRY}",
        f"What is the main point of this text?\n{_BEES}",
        f"Write a short summary of the following message.\n{_MEETING}",
    ),
    "code": (
        "Write a Python function that returns the second largest number of a list.",
        "Write a Python class for a bank account with deposit and withdraw methods.",
        "Show me how to read a CSV file in Python and print the sum of its second column.",
    ),
    "extraction": (
        f"List every name, number and time in this text:\n{_FERRY}",
        f"Copy the sentences that mention the sun or the antennae:\n{_BEES}",
        f"From this message, list who does what and when:\n{_MEETING}",
    ),
    "rewrite": (
        f"Rewrite this message in a polite and formal tone:\n{_MEETING}",
        f"Rewrite this text in the present tense:\n{_FERRY}",
        f"Repeat the following text and correct any mistakes:\n{_BEES}",
    ),
}
