"""Models behind HTTP: slots over states of one size, the scheduler, the OpenAI endpoints and the race page."""
