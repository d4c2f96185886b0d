"""Five kinds of requests, from free prose, which no drafter predicts, to rewriting, where most of it is given."""

PASSAGE = (
    "The lighthouse at Cape Moran was built in 1871 by the engineer Ada Thorne. It stands 43 metres tall and its lamp "
    "can be seen from 31 kilometres away. For ninety years a keeper lived in the small stone house beside it. In 1961 "
    "the lamp was made automatic, and the last keeper, Samuel Reed, moved to the village of Port Ellis. Today the "
    "tower belongs to the village, and every summer about 12,000 visitors climb its 217 steps. The stone house is a "
    "museum of maritime history with a collection of ship models, letters and maps."
)

FUNCTION = (
    "def average_of_positive(values):\n    total = 0\n    count = 0\n    for value in values:\n        if value > 0:\n"
    "            total = total + value\n            count = count + 1\n    if count == 0:\n        return 0\n"
    "    return total / count\n"
)

PROMPTS: dict[str, str] = {
    "free prose": "Write a short story about a baker who finds an old key in a loaf of bread.",
    "summary": f"Summarize this text in three sentences:\n\n{PASSAGE}",
    "code": f"Here is a Python function:\n\n{FUNCTION}\nWrite the same function, but for negative values.",
    "extraction": f"Copy the sentences of this text that contain a number, word for word:\n\n{PASSAGE}",
    "rewrite": f"Repeat this text exactly, but write 'beacon' in place of 'lighthouse':\n\n{PASSAGE}",
}
