"""Two disjoint sets of questions: thresholds are set on the first, and figures are reported on the second only."""

CALIBRATION = (
    "Why is the sky blue?",
    "Write a short letter to a landlord about a broken heater.",
    "What is the difference between a list and a tuple in Python?",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a birthday party for a ten-year-old.",
    "Translate into French: I would like a cup of coffee, please.",
    "Who was Marie Curie, and what did she discover?",
    "Write a function that reverses a string.",
    "How do I make bread without yeast?",
    "List the planets of the solar system with one fact about each.",
    "Tell me a story about a fox who could not sleep.",
    "What should I pack for a week in the mountains?",
)

REPORTING = (
    "How does a refrigerator work?",
    "Write a poem about the sea in autumn.",
    "What does the command 'git rebase' do?",
    "Explain compound interest with an example.",
    "Suggest a vegetarian dinner for four people.",
    "Summarize the story of Romeo and Juliet.",
    "What causes earthquakes?",
    "Write an SQL query that counts orders for each customer.",
    "How can I learn to play the guitar as an adult?",
    "Compare cats and dogs as pets.",
    "Tell me a joke about a programmer, and explain it.",
    "What happened at the Battle of Hastings?",
)
