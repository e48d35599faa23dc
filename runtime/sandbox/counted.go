package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// countedEngine counts the errors of an Engine by operation. ErrNoContainer is a result
// and not counted.
type countedEngine struct {
	Engine
	errors *prometheus.CounterVec
}

func (e countedEngine) count(operation string, err error) error {
	if err != nil && !errors.Is(err, ErrNoContainer) && !errors.Is(err, context.Canceled) {
		e.errors.WithLabelValues(operation).Inc()
	}
	return err
}

func (e countedEngine) EnsureImage(ctx context.Context, ref string, progress func(string)) error {
	return e.count("ensure_image", e.Engine.EnsureImage(ctx, ref, progress))
}

func (e countedEngine) Create(ctx context.Context, spec ContainerSpec) error {
	return e.count("create", e.Engine.Create(ctx, spec))
}

func (e countedEngine) Start(ctx context.Context, id ID, limits Limits) (Container, error) {
	c, err := e.Engine.Start(ctx, id, limits)
	return c, e.count("start", err)
}

func (e countedEngine) Stop(ctx context.Context, id ID, grace time.Duration) error {
	return e.count("stop", e.Engine.Stop(ctx, id, grace))
}

func (e countedEngine) Remove(ctx context.Context, id ID) error {
	return e.count("remove", e.Engine.Remove(ctx, id))
}

func (e countedEngine) RemoveFolder(ctx context.Context, path string) error {
	return e.count("remove_folder", e.Engine.RemoveFolder(ctx, path))
}

func (e countedEngine) Inspect(ctx context.Context, id ID) (Container, error) {
	c, err := e.Engine.Inspect(ctx, id)
	return c, e.count("inspect", err)
}

func (e countedEngine) List(ctx context.Context) ([]Container, error) {
	list, err := e.Engine.List(ctx)
	return list, e.count("list", err)
}
