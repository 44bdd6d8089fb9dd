"""A pytest plugin for verl's own tests: a Ray cluster with room for verl's queue, which needs over two processors.

Without room those tests wait for ever. To Ray, processors are a number that it counts with; no more of them are needed.
"""


def pytest_collection_finish(session):
    if any("tq_init" in getattr(item, "fixturenames", ()) for item in session.items):
        import ray

        ray.init(num_cpus=16, include_dashboard=False)
