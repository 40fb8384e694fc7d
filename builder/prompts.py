"""What `verify` asks: everyday chat questions of many kinds (read offline)."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "Give me a Python function that reverses a list.",
    "Who wrote Pride and Prejudice?",
    "What is 17 times 23? Show your work.",
    "List five healthy breakfast ideas.",
    "Translate 'good morning' into Spanish and French.",
    "Summarise the plot of Romeo and Juliet.",
    "What causes earthquakes?",
    "Write a short email that declines a meeting.",
    "How do I boil an egg?",
    "Tell me a joke about computers.",
    "What is the difference between a virus and a bacterium?",
    "Write the opening line of a mystery novel.",
    "How does a bicycle stay upright?",
    "Name three rivers in Africa and describe one.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "What are the benefits of exercise?",
    "Explain what an API is.",
    "Write a SQL query that counts users by country.",
    "Give me advice for a job interview.",
    "Describe the taste of an orange.",
    "What happened on the Moon in 1969?",
)
