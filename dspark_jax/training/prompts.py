"""Prompts for training texts: written for this project, filled with random details.

A template is text with slots like `{name}` or `{small2}`: the word picks a list below,
a trailing digit tells two draws apart, and one slot has one value within a prompt. Code
prompts also use the documentation of Python's standard library, read at run time. No
evaluation set was used for any of it.
"""

import importlib
import inspect
import re

import numpy as np

# Beginnings of user turns that the target completes.
OPENINGS = tuple(
    "Write a|Write a short story about|Explain|Explain why|Explain how|What is|What are|"
    "What does|What would happen if|How do I|How can I|How does|How many|How much|Why do|"
    "Why is|When did|Where can|Who was|Which of|Can you|Could you help me|Please write|"
    "Give me|Give an example of|List|List five|Name three|Describe|Compare|Summarize|"
    "Rewrite the following|Translate|Correct the grammar|Classify|Suggest|Recommend|"
    "Create a|Create a plan for|Design a|Draft an email|Compose a poem|Imagine|Pretend|"
    "You are a|Act as|I want to|I need|I have a|I am trying to|I'm planning|My friend|"
    "Let's|Tell me|Tell me about|Help me|Solve|Calculate|Find the|If a train|A farmer|"
    "A store sells|There are|Suppose|Given a list|Write a Python function|Write a program|"
    "Implement|Write code that|Fix this code|Write a SQL query|Debug|What is wrong with|"
    "In one sentence|In simple terms|Step by step|Brainstorm|Outline|Analyze|Is it true|"
    "Does|Do you think|Should I|What's the difference between|Generate".split("|")
)
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_WORDS = {
    "name": "Mara|Jonas|Priya|Felix|Aisha|Tomas|Lena|Omar|Greta|Kenji|Sofia|Ravi|Nina|"
    "Pavel|Amara|Hugo|Ines|Dmitri|Yara|Caleb|Freya|Andre|Mei|Oscar|Tara|Silas|Ruth|Ivan",
    "thing": "apples|marbles|stickers|notebooks|pencils|shells|cards|stamps|beads|coins|"
    "cookies|muffins|books|tickets|balloons|plants|tiles|candles|postcards|buttons|eggs",
    "box": "boxes|bags|crates|baskets|jars|shelves|packets|trays|drawers|buckets",
    "place": "bakery|library|school|garden center|museum|farm|bookshop|workshop|cafe|zoo|"
    "market|bike shop|theater|swimming pool|hotel|factory",
    "job": "teacher|nurse|gardener|carpenter|pilot|chef|librarian|mechanic|farmer|tailor|"
    "programmer|musician|photographer|accountant|designer|lifeguard",
    "animal": "fox|owl|turtle|rabbit|hedgehog|crow|otter|cat|donkey|whale|spider|wolf",
    "topic": "photosynthesis|the water cycle|inflation|black holes|vaccines|democracy|"
    "machine learning|volcanoes|the solar system|plate tectonics|recycling|gravity|DNA|"
    "the printing press|solar power|evolution|coral reefs|compound interest|electricity|"
    "the immune system|ocean currents|magnets|bees and pollination|sleep|glaciers|bridges|"
    "supply and demand|the Roman Empire|the Silk Road|nutrition|public transport|music "
    "theory|chess|batteries|weather forecasts|antibiotics|satellites|rainforests|the brain",
    "hobby": "gardening|running|painting|baking bread|playing the guitar|hiking|chess|"
    "photography|cycling|knitting|learning Spanish|swimming|birdwatching|pottery|yoga",
    "feeling": "happy|nervous|grateful|disappointed|curious|tired|proud|lonely|excited",
    "style": "formal|friendly|concise|persuasive|playful|simple|polite|dramatic|neutral",
    "audience": "a ten-year-old|a beginner|a busy manager|a college student|my grandmother|"
    "a new employee|a group of tourists|an expert in another field|high school students",
    "form": "poem|short story|limerick|dialogue|speech|song|letter|diary entry|fable|haiku",
    "item": "laptop|backpack|coffee maker|bicycle|desk lamp|tent|water bottle|headphones|"
    "winter jacket|board game|phone|garden hose|backyard grill|suitcase",
    "city": "Lisbon|Kyoto|Nairobi|Oslo|Montreal|Cusco|Prague|Hanoi|Dublin|Cape Town|Seoul",
    "food": "vegetable soup|pancakes|fried rice|lentil curry|apple pie|pasta salad|tacos|"
    "banana bread|omelettes|roasted potatoes|fruit smoothies",
    "event": "a birthday party|a job interview|a camping trip|a science fair|a wedding|a "
    "team meeting|an exam week|a charity run|a move to a new city|a family reunion",
    "sentence": "The meeting was moved to Tuesday because the manager is sick.|She don't "
    "like to swim when the water are cold.|Our new phone lasts two days on one charge.|"
    "I can't believe how slow this website is.|The movie was long, but the ending was "
    "beautiful.|He go to school every day by bus.|Please send me the report before Friday "
    "noon.|The soup was cold and nobody apologized.|They has been waiting since morning.|"
    "We regret to inform you that the event has been canceled.|The staff were friendly and "
    "the room was spotless.|My package arrived broken and support never answered.",
    "paragraph": "The town library opened a repair corner where neighbors fix lamps, chairs "
    "and toys together. In its first month it saved more than two hundred items from the "
    "bin, and the waiting list keeps growing.|Rivers carry sand and mud from the mountains "
    "to the sea. When the water slows down, the heaviest grains sink first, which is why "
    "pebbles lie upstream and fine mud covers the delta.|Last year the company moved most "
    "of its servers to a colder region. Cooling costs fell by a third, but engineers now "
    "travel farther, and some customers noticed slower replies.|Honeybees tell each other "
    "where food is by dancing. The angle of the dance shows the direction from the sun, and "
    "its length shows the distance.|The new tram line will link the harbor with the "
    "university. Construction takes three years, two streets will close, and shop owners "
    "ask the city for help during that time.|Bread rises because yeast eats sugar and "
    "gives off gas. The gas is trapped by gluten, a net of proteins that forms when flour "
    "and water are kneaded.",
    "list": "apple, carrot, banana, potato, cherry|hammer, violin, screwdriver, flute, saw|"
    "dog, sparrow, shark, eagle, horse|red, seven, blue, twelve, green|Mars, Brazil, Venus, "
    "Egypt, Saturn|happy, angry, calm, furious, cheerful|cotton, iron, wool, copper, silk",
    "language": "Python|Python|Python|JavaScript|Java|C++|Go|Rust|SQL|Bash",
    "task": "checks whether a string is a palindrome|returns the largest even number in a "
    "list|counts how often each word occurs in a text|merges two sorted lists|removes "
    "duplicates from a list and keeps the order|reverses the words of a sentence|computes "
    "the factorial of a number|finds all prime numbers below n|converts Celsius to "
    "Fahrenheit|returns the second smallest element of a list|flattens a nested list|"
    "computes the greatest common divisor of two integers|counts the vowels in a string|"
    "rotates a list by k positions|validates an email address|finds the longest common "
    "prefix of several strings|sums the digits of an integer|transposes a matrix|returns "
    "the n-th Fibonacci number|groups words that are anagrams|finds the first repeated "
    "character|converts a Roman numeral to an integer|computes a moving average|checks "
    "whether brackets are balanced|performs a binary search|sorts a list of tuples by the "
    "second element|reads a CSV file and returns the average of one column|encodes a string "
    "with run lengths|finds the intersection of two lists|generates a random password|"
    "computes the median of a list|splits a list into chunks of size n|counts the days "
    "between two dates|finds the pair of numbers that adds up to a target|capitalizes every "
    "word|returns the most common element of a list|checks whether a year is a leap year|"
    "computes the dot product of two vectors|inverts a dictionary|calculates the area of a "
    "polygon",
    "structure": "a stack|a queue|a linked list|a binary tree|a hash map|a graph with "
    "breadth-first search|a priority queue|a simple bank account|a shopping cart|a timer|a "
    "deck of cards|a text-based menu|a least-recently-used cache|a matrix",
}
_LISTS = {key: tuple(text.split("|")) for key, text in _WORDS.items()}
_RANGES = {"few": (2, 9), "small": (3, 20), "mid": (12, 90), "big": (100, 900)}

_MATHS = tuple(
    "{name} has {mid} {thing}. {name2} gives {name} {small} more, and then {name} loses "
    "{few}. How many {thing} does {name} have now?|"
    "A {place} has {few} {box} with {small} {thing} each. It sells {mid} {thing} in total "
    "over {few2} days. How many {thing} are left?|"
    "{name} buys {few} {thing} for ${few2} each and {few3} {thing2} for ${small} each. How "
    "much does {name} spend altogether?|"
    "A train travels {mid} miles per hour for {few} hours and then {mid2} miles per hour "
    "for {few2} hours. How far does it travel?|"
    "{name} earns ${small} per hour and works {few} hours a day, {few2} days a week. How "
    "much does {name} earn in {few3} weeks?|"
    "There are {big} students in a school. {mid}% of them walk to school and the rest take "
    "the bus. How many students take the bus?|"
    "{name} is {small} years old. {name2} is {few} times as old as {name}. In {few2} years, "
    "what will be the sum of their ages?|"
    "A recipe for {few} people needs {big} grams of flour. How much flour is needed for "
    "{small} people?|"
    "A {item} costs ${big}. The shop gives a discount of {mid}%. What is the final price?|"
    "{name} reads {small} pages on Monday, twice as many on Tuesday, and {few} fewer on "
    "Wednesday than on Tuesday. How many pages does {name} read in three days?|"
    "A rectangular garden is {mid} meters long and {small} meters wide. What is its area, "
    "and how much fence is needed to go around it?|"
    "The {job} packs {big} {thing} into {box} that hold {small} each. How many {box} are "
    "full, and how many {thing} remain?|"
    "{name} and {name2} share ${big} in the ratio {few} to {few2}. How much does each get?|"
    "A tank holds {big} liters. A pump fills it at {small} liters per minute while {few} "
    "liters per minute leak out. How long does it take to fill the tank?|"
    "{name} saves ${small} every week. After {few} weeks {name} spends ${mid} on a {item}. "
    "How many more weeks are needed to have ${big}?|"
    "The average of {few}, {small}, {mid} and x is {mid2}. What is x?|"
    "Solve for x: {few}x + {mid} = {big}.|Solve for x: {small}(x - {few}) = {mid}.|"
    "What is {mid} * {small} - {big}?|What is {mid}% of {big}?|"
    "A bus starts with {mid} people. At each of {few} stops, {few2} people get off and "
    "{few3} get on. How many people are on the bus at the end?|"
    "On a farm there are {small} cows and {mid} chickens. How many legs do they have in "
    "total?|"
    "{name} runs {few} kilometers every day except Sunday. How many kilometers does {name} "
    "run in {small} weeks?|"
    "A box holds {few} red, {few2} blue and {few3} green marbles. What is the probability "
    "of drawing a blue marble?|"
    "{name} had some {thing}. After giving {few} to each of {few2} friends, {name} has "
    "{mid} left. How many {thing} did {name} have at the start?".split("|")
)
_CODE = tuple(
    "Write a {language} function that {task}.|Write a Python function that {task}.|"
    "Write a Python function that {task}. Include a docstring and an example.|"
    "Implement {structure} in {language}.|Implement {structure} in Python and explain how "
    "it works.|Show me how to write {language} code that {task}.|"
    "Explain step by step how a program that {task} works.|"
    "Write unit tests for a Python function that {task}.|"
    "I need a short script in {language} that {task}. Can you write it?|"
    "What is the time complexity of an algorithm that {task}?|"
    "Write a Python class for {structure} with at least {few} methods.|"
    "My {language} function {task}, but it is slow for large inputs. How can I improve "
    "it?".split("|")
)
_DOCUMENTED = (
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Write the body of this function:\n\n{code}",
    "Finish this code and return the whole function in a code block.\n```python\n{code}```",
    "Here is a Python function without its body. Please implement it.\n{code}\n",
    "Write a Python function `{function}` that does the following:\n{doc}",
    'Implement this specification in Python:\n\n"""{doc}"""',
    "Explain what a function with this documentation does, then write it:\n{doc}",
    "Provide a complete, self-contained implementation that fits this beginning:\n{code}",
)
_INSTRUCTIONS = tuple(
    "Rewrite this sentence in a {style} tone: {sentence}|"
    "Correct the grammar of this sentence: {sentence}|"
    "Is the following text positive, negative or neutral? {sentence}|"
    "Make this sentence shorter: {sentence}|Turn this sentence into a question: {sentence}|"
    "Summarize the following text in one sentence.\n\n{paragraph}|"
    "Give a title to this text and list its main points.\n\n{paragraph}|"
    "Write three questions about this text.\n\n{paragraph}|"
    "Explain this text to {audience}:\n{paragraph}|"
    "Sort these words into two groups and name the groups: {list}|"
    "Which word does not belong, and why? {list}|"
    "Explain {topic} to {audience}.|Explain {topic} in {few} sentences.|"
    "What are the advantages and disadvantages of {topic}?|"
    "List {few} interesting facts about {topic}.|Write a quiz of {few} questions on {topic}.|"
    "Write a {form} about {topic}.|Write a {form} about a {job} and a {animal}.|"
    "Write a {form} that makes the reader feel {feeling}.|"
    "Tell a story about a {animal} who is afraid of {topic}.|"
    "Make a plan for {event} with {few} steps.|Make a checklist for {event}.|"
    "Plan {few} days in {city} for {audience}.|Give me a recipe for {food} for {few} people.|"
    "Suggest {few} gifts for a {job} who likes {hobby}.|"
    "How can I get better at {hobby}? Give {few} tips.|I feel {feeling} about {event}. What "
    "should I do?|Write an email to {name} about {event}. Keep it {style}.|"
    "Write a review of a {item} that I bought for {event}.|"
    "Write a product description for a {item} in a {style} style.|"
    "You are a {job}. Answer a customer who asks about {topic}.|"
    "Pretend to be a {animal} that talks about {topic}.|"
    "Act as a {job} and introduce yourself to {audience}.|"
    "Have a conversation between a {job} and a {job2} about {hobby}.|"
    "Compare {topic} and {topic2}.|What does {topic} have to do with {topic2}?|"
    "Argue for and against this statement: everyone should learn about {topic}.|"
    "What would a world without {topic} look like?|Give me a metaphor for {topic}.|"
    "What should I know before I start {hobby}?|What is the history of {topic}?|"
    "Define {topic} and give an example.|Write a slogan for a {place} in {city}.|"
    "Name {few} things that one can find in a {place}.|Create a weekly schedule for a {job} "
    "who wants to start {hobby}.|Translate into Spanish: {sentence}|"
    "Write {few} short headlines about {topic}.|Convert this text into bullet points: "
    "{paragraph}|Continue this story: {paragraph}|Write a {style} message to thank {name} "
    "for {event}.".split("|")
)
_MODULES = (
    "argparse ast asyncio base64 bisect calendar cmath collections colorsys configparser "
    "contextlib copy csv datetime decimal difflib email.utils enum fileinput fnmatch "
    "fractions functools gettext glob graphlib gzip hashlib heapq html http.client imaplib "
    "inspect ipaddress itertools json keyword linecache locale logging math mimetypes "
    "numbers operator os os.path pathlib pickle platform pprint queue random re sched "
    "secrets shelve shlex shutil smtplib socket statistics string struct subprocess "
    "tarfile tempfile textwrap threading timeit token tokenize traceback types typing "
    "unittest urllib.parse urllib.request uuid warnings wave weakref zipfile zlib"
).split()


def make_prompts(rng: np.random.Generator, count: int) -> list[str]:
    """`count` complete prompts: 40 % word problems, 30 % code, 30 % instructions."""
    documented = documented_functions()
    makers = (_word_problem, _code, _instruction)
    kinds = rng.choice(len(makers), size=count, p=(0.4, 0.3, 0.3))
    return [makers[kind](rng, documented) for kind in kinds]


def documented_functions() -> list[tuple[str, str, str]]:
    """(name, signature, docstring) of the standard library's documented functions."""
    found = {}
    for module_name in _MODULES:
        members = vars(importlib.import_module(module_name))
        classes = [value for value in members.values() if inspect.isclass(value)]
        for space in (members, *(vars(found_class) for found_class in classes)):
            for name, value in list(space.items()):
                if name.startswith("_") or not inspect.isroutine(value):
                    continue
                doc = inspect.getdoc(value) or ""
                try:
                    signature = str(inspect.signature(value))
                except (TypeError, ValueError):  # some builtins have none
                    continue
                # Defaults that print an address would differ from run to run.
                plain = len(signature) < 90 and " at 0x" not in signature
                if 40 <= len(doc) <= 420 and plain:
                    found.setdefault(doc, (name, signature, doc))
    return [found[doc] for doc in sorted(found)]


def fill(rng: np.random.Generator, template: str) -> str:
    """Replaces every slot of a template by a random value."""
    values: dict[str, str] = {}

    def replace(match: re.Match) -> str:
        slot = match[1]
        if slot not in values:
            values[slot] = _draw(rng, slot.rstrip("0123456789"), set(values.values()))
        return values[slot]

    return re.sub(r"\{(\w+)\}", replace, template)


def _draw(rng: np.random.Generator, kind: str, used: set[str]) -> str:
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return str(rng.integers(low, high + 1))
    choices = _LISTS[kind]
    for _ in range(8):  # two names in one prompt should differ
        value = str(choices[rng.integers(len(choices))])
        if value not in used:
            break
    return value


def _pick(rng: np.random.Generator, choices):
    return choices[rng.integers(len(choices))]


def _word_problem(rng: np.random.Generator, documented: list) -> str:
    del documented
    text = fill(rng, _pick(rng, _MATHS))
    return text + BOXED if rng.random() < 0.5 else text


def _code(rng: np.random.Generator, documented: list) -> str:
    if rng.random() < 0.4:
        return fill(rng, _pick(rng, _CODE))
    name, signature, doc = _pick(rng, documented)
    indented = "\n    ".join(doc.splitlines())
    code = f'def {name}{signature}:\n    """{indented}\n    """\n'
    template = _pick(rng, _DOCUMENTED)
    # The docstring may hold braces: no formatting after it is in.
    for slot, value in (("{function}", name), ("{doc}", doc), ("{code}", code)):
        if slot in template:
            before, after = template.split(slot, 1)
            template = before + value + after
            break
    return template


def _instruction(rng: np.random.Generator, documented: list) -> str:
    del documented
    return fill(rng, _pick(rng, _INSTRUCTIONS))
