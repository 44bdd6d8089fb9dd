"""How engines are reached: HTTP, processes, and folders of weights."""
