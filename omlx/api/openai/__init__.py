"""The OpenAI dialect: schema, translation, routes."""
