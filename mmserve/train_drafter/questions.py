"""What a model is asked, so that it writes the texts that its drafter is trained on.

Owns the words alone. The answers are the model's; so are most of the questions (see `writing`):
these are the ones that people begin with, whatever the model would ask by itself.
"""

from __future__ import annotations

import random

_TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "Explain {} in simple terms.",
    "What is {}?",
    "Tell me about {}.",
    "Give me five facts about {}.",
    "List ten ideas to do with {}.",
    "Write a poem about {}.",
    "Write a letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "How does {} work?",
    "Why is {} important?",
    "Summarize the history of {}.",
    "Write a paragraph about {}.",
    "Write an email that asks for help with {}.",
    "Give me step-by-step instructions for a beginner about {}.",
    "Compare {} with {}.",
    "What would happen without {}?",
    "Write a dialogue between two people about {}.",
    "Write three questions and answers about {}.",
    "Make a table of the most important things about {}.",
    "Describe {} in detail.",
    "Write a product description for {}.",
    "Write a Python function to do with {}, and explain it.",
    "Write a JSON object that describes {}.",
    "Give me advice about {} and {}.",
    "What do {} and {} have in common?",
    "Write a story in which {} meets {}.",
    "Is {} better than {}?",
    "Plan a lesson about {} and {}.",
    "Make a list of questions about {} and {}.",
    "Write a headline and a short article about {} and {}.",
    "Write a song about {} and {}.",
    "Imagine {} without {}. Describe it.",
    "Translate into French: I like {} and {}.",
    "How are {} and {} related?",
    "Convince me that {} matters more than {}.",
)
_TOPICS = (
    *("the sea", "volcanoes", "bicycles", "bread", "the moon", "photosynthesis", "gravity", "rain"),
    *("elephants", "music", "chess", "football", "electricity", "the internet", "computers"),
    *("the Roman Empire", "trains", "coffee", "honey bees", "dinosaurs", "climate change", "money"),
    *("sleep", "exercise", "vaccines", "the heart", "solar energy", "a small garden", "cooking"),
    *("a lost dog", "a dragon", "time travel", "friendship", "a lighthouse", "winter", "a library"),
    *("prime numbers", "fractions", "sorting a list", "databases", "machine learning", "robots"),
    *("Paris", "Japan", "the Amazon river", "mountains", "deserts", "the ocean", "stars", "maps"),
    *("a birthday party", "a job interview", "learning a language", "saving water", "recycling"),
    *("the Olympic Games", "painting", "photography", "cinema", "books", "a school", "teachers"),
    *("healthy food", "chocolate", "apples", "cats", "birds", "horses", "fish", "trees", "flowers"),
)
_FOLLOW_UPS = (
    "Can you explain that more simply?",
    "Give me an example.",
    "Summarize this in one sentence.",
    "Why?",
    "Tell me more.",
    "Write it again, but shorter.",
    "Repeat your answer word for word.",
    "What else should I know?",
    "Thank you!",
)
_ABOUT_PICTURES = (
    *("Describe this image.",) * 4,
    *("Describe this image in detail.",) * 3,
    *("What do you see?", "What is in this image?", "What is shown here?") * 2,
    "Write a caption for this image.",
    "What shape is in the image?",
    "What color is the shape?",
    "Which shapes are there, and which colors do they have?",
    "How many shapes are there?",
    "What is on the left?",
    "What is at the top?",
    "Is there a red circle?",
    "Is there a triangle in the picture?",
    "What color is the background?",
    "Is any text shown? What does it say?",
    "Which number is shown?",
    "Tell me a short story about this image.",
    "List everything that you see in this picture.",
)


def about_text(random: random.Random) -> str:
    task = random.choice(_TASKS)
    return task.format(*random.sample(_TOPICS, task.count("{}")))


def about_picture(random: random.Random) -> str:
    return random.choice(_ABOUT_PICTURES)


def further(random: random.Random) -> str:
    """Behind an answer."""
    return random.choice(_FOLLOW_UPS)
