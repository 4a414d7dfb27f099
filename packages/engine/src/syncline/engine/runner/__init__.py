"""What executes a plan: the Protocol the engine drives, and the runner of real models."""

from syncline.engine.runner.model_runner import ModelRunner
from syncline.engine.runner.protocol import Runner
from syncline.engine.runner.settings import RunnerSettings

__all__ = ["ModelRunner", "Runner", "RunnerSettings"]
