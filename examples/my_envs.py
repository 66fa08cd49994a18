"""An environment of your own: tasks, and one method a reward.

    mrgym check my_envs:Haiku
    mrgym train my_envs:Haiku steps=20

Run the commands in the folder that holds this file.
"""

import mrgym
from mrgym import Completion, Task, component

TOPICS = ("rain", "snow", "wind", "moon", "river", "stone", "frog", "night", "spring", "fire")


class Haiku(mrgym.SingleTurnEnv):
    """Three short lines that name their topic."""

    instruction = "Write a haiku. Answer with its three lines and nothing else."

    def tasks(self) -> list[Task]:
        """Return all tasks; a stable fifth of them is held out."""
        return [Task(prompt=f"Write a haiku about {topic}.", answer=topic) for topic in TOPICS]

    @component(low=0, high=1)
    def three_lines(self, task: Task, completion: Completion) -> float:
        """How near the number of lines is to three."""
        return 1 / (1 + abs(len(completion.strip().splitlines()) - 3))

    @component(low=0, high=1)
    def on_topic(self, task: Task, completion: Completion) -> bool:
        """1 if the topic is named."""
        return task.answer in completion.lower()

    @component(low=-1, high=0, weight=0.1)
    def brief(self, task: Task, completion: Completion) -> float:
        """0 for an empty text, -1 from 200 characters on."""
        return -min(len(completion) / 200, 1)
