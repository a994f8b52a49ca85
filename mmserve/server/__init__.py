"""The HTTP and WebSocket border: OpenAI's surfaces over one engine.

Owns protocols, auth, limits, the response store and uploads. Knows nothing of tensors or pages; the
engine is seen only through `engine_face`.
"""
