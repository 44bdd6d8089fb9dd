"""A pytest plugin for verl's own tests: a Ray cluster with room for verl's queue, which asks for more than two processors.

Without room those tests wait for ever. Processors are a number that Ray counts with, so this one needs no more of them.
"""


def pytest_collection_finish(session):
    if any("tq_init" in getattr(item, "fixturenames", ()) for item in session.items):
        import ray

        ray.init(num_cpus=16, include_dashboard=False)
