"""The prompts of the quality gate: what people ask a small assistant for, four of them as JSON."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatePrompt:
    """One request. json: the answer must be one JSON value, alone or in a code fence."""

    name: str
    text: str
    json: bool = False


PROMPTS = (
    GatePrompt(
        "explain",
        "Explain to a ten-year-old why the sky is blue during the day and red in the evening. Take the time to say "
        "what light is made of, what air does to it, and what changes when the sun stands low. End with an experiment "
        "that can be done in a kitchen with a glass of water, a torch and a few drops of milk.",
    ),
    GatePrompt(
        "story",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle. The letter was written by "
        "someone who grew up in the same village a hundred years before. Let the keeper answer it. Use plain words, "
        "no moral at the end, and let the weather play a part.",
    ),
    GatePrompt(
        "summary",
        "Summarise the following in five sentences. The city council met on Tuesday to discuss the old tram depot. "
        "Three proposals were on the table: a market hall, a library with workshops, and flats for students. The "
        "market hall would cost eleven million and open in two years. The library would cost fourteen million, half "
        "of which the region would pay. The flats would be built by a private company, which wants a lease of ninety "
        "years. Shopkeepers nearby spoke for the market hall, teachers for the library. The council asked for a study "
        "of the roof, which has been leaking since the winter, and will decide in March.",
    ),
    GatePrompt(
        "steps",
        "Give instructions for repotting a large house plant that has outgrown its pot. List what is needed, then the "
        "steps in order, then three mistakes that people often make, each with the reason why it harms the plant.",
    ),
    GatePrompt(
        "code",
        "Write a Python function that takes a list of intervals, each a pair of integers, and returns the merged "
        "intervals in ascending order. Then explain how it works line by line, what it costs in time, and give three "
        "tests: an empty list, intervals that touch, and one interval inside another.",
    ),
    GatePrompt(
        "arithmetic",
        "A shop sells pencils in packs of 12 for 3 euros and pens in packs of 5 for 4 euros. A school needs 150 "
        "pencils and 80 pens. Work out step by step how many packs of each it must buy, what that costs, how many "
        "pieces are left over, and what it would cost per pupil in a class of 25.",
    ),
    GatePrompt(
        "letter",
        "Write a polite letter to a landlord about a heating that has not worked for two weeks in November. Mention "
        "that it was reported twice by telephone, on the 3rd and on the 9th, that there is a small child in the flat, "
        "and that you expect a repair within five days. Stay friendly.",
    ),
    GatePrompt(
        "compare",
        "Compare travelling from one city to another 600 kilometres away by train, by car and by plane. Look at time "
        "from door to door, cost for a family of four, comfort, and what it means for the climate. Say which you "
        "would take and under which circumstances you would choose otherwise.",
    ),
    GatePrompt(
        "person",
        "Answer with JSON alone. Describe an invented person as an object with the keys name (a string), age (an "
        "integer), city (a string), hobbies (a list of five strings), and siblings (a list of two objects, each with "
        "name and age).",
        json=True,
    ),
    GatePrompt(
        "recipe",
        "Answer with JSON alone. Give a recipe for vegetable soup for four people as an object with the keys title, "
        "minutes (an integer), ingredients (a list of objects with name, amount and unit) and steps (a list of "
        "strings).",
        json=True,
    ),
    GatePrompt(
        "timetable",
        "Answer with JSON alone. Make a timetable for one school week as an object whose keys are the five weekdays. "
        "Each value is a list of four objects with the keys hour (an integer from 1 to 4), subject and room.",
        json=True,
    ),
    GatePrompt(
        "extract",
        "Answer with JSON alone: a list of objects with the keys product, quantity and price for this order. Please "
        "send us 12 boxes of candles at 4.50 each, 3 lamps at 29.90 each, a ladder for 75, and 40 metres of rope at "
        "1.20 a metre. We also need 6 paint brushes at 3.75 each and two buckets for 8 each.",
        json=True,
    ),
)
