"""Pictures: read from files, made into what models take, and put into prompts."""

from flaxen.image.picture import open_picture
from flaxen.image.processor import image_processor
from flaxen.image.prompt import pictured_prompt

__all__ = ["image_processor", "open_picture", "pictured_prompt"]
