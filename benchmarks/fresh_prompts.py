"""Four requests of each kind that were written after everything the bundled drafter was trained on (24 November 2026).

Nothing was chosen by them: neither the drafter's training nor how drafters are mixed. Once a drafter has been improved
by looking at these, write others.
"""

_VOLCANO = (
    "Mount Hale woke on 3 May after 214 years of silence. At 5:20 in the morning ash rose nine kilometres high, and by "
    "noon the towns of Brenn and Osk lay in the dark. Mayor Lena Varga had all 6,400 people driven to the coast in "
    "buses and fishing boats. Two farmers who went back for their goats were found safe on Thursday. Geologists "
    "expect that the mountain will smoke until winter. The harvest of the valley, mostly plums, is lost."
)
_LIBRARY = (
    "Hello Peter, I am writing because the library wants to open on sundays from march on. We need two people for each "
    "sunday, one at the desk and one for the children. Marta can do the first and third sunday but not before 11. I "
    "would take the second. The key is with Mr Olsen, he lives at number 12. Please tell me till friday what you think."
)
_SALT = (
    "Salt was once so valuable that soldiers were paid with it. It kept meat and fish from spoiling long before there "
    "were refrigerators. Merchants carried it on camels through the Sahara, and cities grew rich by taxing it. Today "
    "most salt comes from mines or from shallow ponds by the sea, where sun and wind dry the water. Only a small part "
    "of it is eaten; the rest melts ice on roads or serves chemical factories."
)
_COUNT = (
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n        word = word.lower()\n"
    "        if word in counts:\n            counts[word] = counts[word] + 1\n        else:\n"
    "            counts[word] = 1\n    return counts\n"
)

FRESH_PROMPTS: dict[str, tuple[str, ...]] = {
    "prose": (
        "Write a story about a grandmother who builds a boat in her living room.",
        "Why do people laugh when somebody tickles them?",
        "Write a postcard from a town where it has rained for forty days.",
        "Describe how a thunderstorm comes over a field of wheat.",
    ),
    "summary": (
        f"Summarize the following report in two sentences:\n\n{_VOLCANO}",
        f"What does this text say, in one sentence?\n\n{_SALT}",
        f"Sum up this letter for somebody who has no time:\n\n{_LIBRARY}",
        f"Give this text a headline and a summary of three sentences:\n\n{_VOLCANO}",
    ),
    "code": (
        "Write a Python function that splits a list into chunks of n items.",
        f"Add a parameter to this function for words that are not counted:\n\n{_COUNT}",
        "Write a Python class for a thermostat with a target temperature and a method that says if it heats.",
        "Write a Python script that renames all .jpeg files of a folder to .jpg.",
    ),
    "extraction": (
        f"List all people and places of this report:\n\n{_VOLCANO}",
        f"Copy every sentence of this text that mentions the sea, the Sahara or roads:\n\n{_SALT}",
        f"Which days, times and numbers are in this letter?\n\n{_LIBRARY}",
        f"Copy the first and the last sentence of this text:\n\n{_SALT}",
    ),
    "rewrite": (
        f"Correct the spelling of this letter and change nothing else:\n\n{_LIBRARY}",
        f"Repeat this report, but let it be about Mount Grimm:\n\n{_VOLCANO}",
        f"Rewrite this text for children:\n\n{_SALT}",
        f"Rewrite this function with collections.Counter:\n\n{_COUNT}",
    ),
}
