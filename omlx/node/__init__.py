"""One model, running: manifest, stages, scheduler, engine, chat."""
