"""Two disjoint sets of questions: thresholds are set on the first, and figures are reported on the second only.

Each set has prose, code, lists, dialogue, tables and numbers, and languages other than English.
"""

CALIBRATION = (
    "Why is the sky blue?",
    "Write a short letter to a landlord about a broken heater.",
    "Write a Python function that reverses a linked list, with a docstring and a test.",
    "List the planets of the solar system with one fact about each, as a numbered list.",
    "Erkläre auf Deutsch, wie ein Fahrrad im Gleichgewicht bleibt.",
    "Escribe en español una historia corta sobre un zorro que no podía dormir.",
    "Who was Marie Curie, and what did she discover?",
    "Make a Markdown table of five programming languages with year, author and typing discipline.",
    "Compute 17 * 23 step by step, then 391 / 7 to three decimals, and check the result.",
    "Write a C program that reads integers from standard input and prints their median.",
)

REPORTING = (
    "How does a refrigerator work?",
    "Write a poem about the sea in autumn.",
    "Write an SQL schema for a library, and a query that counts overdue loans for each member.",
    "Give me ten ideas for a vegetarian dinner for four people, as bullet points.",
    "Explique en français ce qui cause les tremblements de terre.",
    "Scrivi in italiano una lettera a un amico che non vedi da dieci anni.",
    "Summarize the story of Romeo and Juliet as a dialogue between two friends.",
    "Write a JSON document that describes three cars with make, model, year and a list of features.",
    "Explain compound interest with an example in numbers over five years.",
    "Write a JavaScript function that debounces another function, and explain each line.",
)
