package helper

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/kopia/kopia/repo/blob"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/testkit"
)

// silent is an object store that accepts requests and never responds.
type silent struct{ blob.Storage }

func (silent) GetBlob(ctx context.Context, _ blob.ID, _, _ int64, _ blob.OutputBuffer) error {
	<-ctx.Done()
	return ctx.Err()
}

func (silent) GetMetadata(ctx context.Context, _ blob.ID) (blob.Metadata, error) {
	<-ctx.Done()
	return blob.Metadata{}, ctx.Err()
}

func (silent) PutBlob(ctx context.Context, _ blob.ID, _ blob.Bytes, _ blob.PutOptions) error {
	<-ctx.Done()
	return ctx.Err()
}

func (silent) DeleteBlob(ctx context.Context, _ blob.ID) error {
	<-ctx.Done()
	return ctx.Err()
}

func (silent) ListBlobs(ctx context.Context, _ blob.ID, _ func(blob.Metadata) error) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestSilentObjectStoreIsUnreachable(t *testing.T) {
	ctx := context.Background()
	for name, request := range map[string]func(*store) error{
		"GetBlob":     func(s *store) error { return s.GetBlob(ctx, "p1", 0, -1, nil) },
		"GetMetadata": func(s *store) error { _, err := s.GetMetadata(ctx, "p1"); return err },
		"PutBlob":     func(s *store) error { return s.PutBlob(ctx, "p1", nil, blob.PutOptions{}) },
		"DeleteBlob":  func(s *store) error { return s.DeleteBlob(ctx, "p1") },
		"ListBlobs":   func(s *store) error { return s.ListBlobs(ctx, "p", nil) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // deadlocks without a limit
				s := &store{Storage: silent{}, ctx: t.Context()}
				testkit.Diff(t, "code", describe(request(s)).Code, wire.Unreachable)
				if failed := s.failure(); failed == nil || failed.Code != wire.Unreachable {
					t.Errorf("the failure is %v", failed)
				}
			})
		})
	}
}
