"""Requests put together from lists, so that a model is asked for thousands of different things.

Owns the lists. Other than a seed (`seed_prompts`), which the model continues as the user, such a request is whole. Most
of them ask for prose, which no other drafter predicts.
"""

from __future__ import annotations

import random
from string import Formatter

_LISTS: dict[str, tuple[str, ...]] = {
    "person": (
        *("a retired sailor", "a young violinist", "a night nurse", "a clockmaker", "a shy astronomer"),
        *("a beekeeper", "twin sisters", "a lost tourist", "a farmer", "an old teacher", "a street painter", "a robot"),
        *(
            "a chess player",
            "a mountain guide",
            "a librarian",
            "a boy with a kite",
            "a tailor",
            "a fox",
            "a blind cook",
        ),
        *("a postman", "a widowed gardener", "a detective", "a dragon", "a girl who cannot sleep", "an astronaut"),
        *("a fisherman", "an orphan", "a king without a kingdom", "a nervous dentist", "a lighthouse cat", "a wolf"),
    ),
    "event": (
        *("gets a letter from a stranger", "misses the last train", "finds a map in an attic", "loses a bet"),
        *("hears music under the floor", "wakes up in another century", "saves a drowning dog", "must hide a secret"),
        *("repairs a broken radio", "meets a childhood friend", "wins a garden contest", "is snowed in for a week"),
        *("learns to swim", "travels across the desert", "discovers a hidden room", "forgets their own name"),
        *("wants to quit", "opens a small shop", "follows a river to its source", "has one wish", "tells the truth"),
        *("plants a strange seed", "gets lost in the fog", "befriends a crow", "inherits a ship", "breaks a promise"),
    ),
    "place": (
        *("a mountain village", "a busy railway station", "a desert at night", "an old library", "a rainforest"),
        *("a small kitchen", "a market in spring", "an abandoned factory", "an island", "a frozen lake", "a hospital"),
        *("a school on the first day", "a castle ruin", "a space station", "a city roof", "a vineyard", "a cave"),
        *("a coral reef", "a country fair", "a hotel lobby", "a bakery before dawn", "a swamp", "a farm in winter"),
    ),
    "topic": (
        *("volcanoes", "the stock market", "sleep", "the French Revolution", "vaccines", "black holes", "chess"),
        *("photosynthesis", "inflation", "whales", "the Roman Empire", "electric cars", "yoga", "the water cycle"),
        *("earthquakes", "coffee", "jazz", "the internet", "antibiotics", "democracy", "rainbows", "glaciers", "bread"),
        *("solar power", "the human heart", "migration of birds", "gravity", "poetry", "recycling", "dreams", "tea"),
        *("the printing press", "machine learning", "soil", "language learning", "dinosaurs", "memory", "tides"),
        *(
            "blockchain",
            "the Silk Road",
            "allergies",
            "public libraries",
            "architecture",
            "meditation",
            "steam engines",
        ),
        *("plate tectonics", "friendship", "loneliness", "supply and demand", "DNA", "comets", "folk music", "stress"),
    ),
    "task": (
        *("learn to play the guitar", "save money", "move to another city", "train for a marathon", "grow tomatoes"),
        *("write a novel", "stop procrastinating", "plan a birthday party", "paint a room", "start a small business"),
        *("prepare for a job interview", "sleep better", "learn Spanish", "make new friends", "bake sourdough bread"),
        *("organize a closet", "read more books", "repair a bicycle", "give a speech", "travel with small children"),
        *("take better photographs", "eat less sugar", "manage a difficult coworker", "choose a laptop", "buy a house"),
    ),
    "recipient": (
        *("my landlord", "an old friend", "my manager", "the city council", "a customer", "my grandmother"),
        *("a newspaper", "a professor", "my neighbor", "a job applicant", "the school principal", "a hotel"),
    ),
    "matter": (
        *("a broken heater", "a delayed delivery", "thanks for a gift", "an invitation to a wedding", "a day off"),
        *("noise at night", "a change of plans", "an apology for being late", "a recommendation", "a refund"),
        *("a new job", "a missed appointment", "good news about my health", "a proposal for a park", "a vacation"),
    ),
    "form": ("a poem", "a song", "a fairy tale", "a dialogue", "a speech", "a diary entry", "a scene", "a fable"),
    "length": ("in one paragraph", "in two paragraphs", "in about 100 words", "in detail", "briefly", "at length"),
    "reader": ("a child", "a beginner", "a student", "an expert", "my grandparents", "a curious friend"),
    "language": ("Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "SQL", "Bash", "Go"),
    "program": (
        *("counts the words in a string", "checks if a number is prime", "sorts a list of dictionaries by a key"),
        *("removes duplicates from a list", "reverses a linked list", "computes the greatest common divisor"),
        *("merges two sorted lists", "finds the longest word in a sentence", "converts Celsius to Fahrenheit"),
        *("validates an email address", "reads a JSON file", "computes Fibonacci numbers", "flattens a nested list"),
        *(
            "finds all anagrams",
            "rotates a matrix",
            "implements a stack",
            "implements binary search",
            "prints a calendar",
        ),
        *("checks whether brackets are balanced", "downloads a web page", "counts vowels", "simulates a dice roll"),
        *("computes the mean and median", "groups words by length", "finds the maximum subarray", "parses a date"),
        *("implements a queue with two stacks", "writes a dictionary to a file", "computes a factorial"),
        *("finds common elements of two lists", "capitalizes every word", "multiplies two matrices", "caches results"),
    ),
    "class": ("a shopping cart", "a library", "a student", "a rectangle", "a timer", "an inventory", "a deck of cards"),
}

_TEMPLATES: tuple[tuple[float, str], ...] = (
    (3, "Write a short story about {person} who {event}."),
    (2, "Tell me a story in which {person} {event}."),
    (1, "Write the beginning of a novel set in {place}. The main character is {person}."),
    (1, "Continue this story: One morning {person} came to {place}."),
    (2, "Describe {place}."),
    (1, "Describe {place} {length}."),
    (1, "What does {place} look like, smell like and sound like?"),
    (2, "Write {form} about {person}."),
    (1.5, "Write {form} about {topic}."),
    (2, "Explain {topic} to {reader}."),
    (2, "Explain {topic} {length}."),
    (1.5, "Write an essay about {topic}."),
    (1, "Why is {topic} important?"),
    (1, "What is interesting about {topic}?"),
    (1, "What are the advantages and disadvantages of {topic}?"),
    (1, "Tell me about {topic}."),
    (1, "What is the history of {topic}?"),
    (2, "How can I {task}?"),
    (1, "Give me advice: I want to {task}."),
    (1, "What should I know before I {task}?"),
    (1, "I would like to {task}, but I have little time. What do you suggest?"),
    (2, "Write a letter to {recipient} about {matter}."),
    (1, "Write an email to {recipient} about {matter}."),
    (0.7, "What is the difference between {topic} and {topic}?"),
    (0.7, "Write a dialogue between {person} and {person} about {topic}."),
    (0.7, "Give me five facts about {topic}."),
    (3, "Write a {language} function that {program}."),
    (1, "Write a {language} program that {program}."),
    (1, "Show me how to write {language} code that {program}, with an explanation."),
    (1, "Write a {language} class for {class}."),
)


def whole_prompt(rng: random.Random) -> str:
    """One request; thousands are possible."""
    template = rng.choices([text for _, text in _TEMPLATES], [weight for weight, _ in _TEMPLATES])[0]
    parts = [before + (rng.choice(_LISTS[name]) if name else "") for before, name, _, _ in Formatter().parse(template)]
    return "".join(parts)
