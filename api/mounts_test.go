package api

import (
	"errors"
	"net/http"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestMounts(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	path := t.TempDir() + "/data"
	body := map[string]any{"bucket": "data", "prefix": "a/b/", "path": path, "read_only": true}
	m := must[types.Mount](s, http.StatusCreated, "POST", "/sandbox/box/mounts", body)
	if m.CreatedAt.IsZero() || m != (types.Mount{Bucket: "data", Prefix: "a/b", Path: path, ReadOnly: true, CreatedAt: m.CreatedAt}) {
		t.Errorf("got %+v", m)
	}
	if again := must[types.Mount](s, http.StatusCreated, "POST", "/sandbox/box/mounts", body); again != m {
		t.Errorf("the second request returned %+v", again)
	}
	list := must[types.MountList](s, http.StatusOK, "GET", "/sandbox/box/mounts", nil).Mounts
	if len(list) != 1 || list[0] != m {
		t.Errorf("got %+v", list)
	}
	s.refused(problem.MountExists, "POST", "/sandbox/box/mounts", map[string]any{"bucket": "models", "path": path})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/mounts", map[string]any{"bucket": "other", "path": path})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/mounts", map[string]any{"bucket": "data", "path": "/proc/data"})
	s.refused(problem.MountPointInvalid, "POST", "/sandbox/box/mounts", map[string]any{"bucket": "data", "path": "/etc/passwd/data"})
	s.refused(problem.MountNotFound, "DELETE", "/sandbox/box/mounts?"+at("/other"), nil)
	s.refused(problem.RequestInvalid, "DELETE", "/sandbox/box/mounts", nil)
	if got := s.do("DELETE", "/sandbox/box/mounts?"+at(path), nil); got.status != http.StatusNoContent {
		t.Errorf("got %d %s", got.status, got.body)
	}
	if list := must[types.MountList](s, http.StatusOK, "GET", "/sandbox/box/mounts", nil).Mounts; len(list) != 0 {
		t.Errorf("got %+v", list)
	}
}

func TestFailedMountsAreExplained(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	body := map[string]any{"bucket": "data", "path": t.TempDir() + "/data"}
	for operation, failures := range map[string]map[*problem.Code]error{
		"check": {
			&problem.ObjectStoreFailed: &sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreDenied, Err: errors.New("access denied")},
		},
		"mount": {
			&problem.FUSERequired:      sandbox.ErrNoFUSE,
			&problem.MountPointInvalid: sandbox.ErrNoMountPoint,
			&problem.EngineUnavailable: sandbox.ErrEngineDown,
		},
	} {
		for code, err := range failures {
			s.node.Buckets.FailOnce(operation, err)
			s.refused(*code, "POST", "/sandbox/box/mounts", body)
		}
	}
	must[types.Mount](s, http.StatusCreated, "POST", "/sandbox/box/mounts", body)
}
