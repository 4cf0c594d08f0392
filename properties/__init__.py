"""Claims about any provider: strategies, contracts and the pytest plugin that runs them."""
