// Package podman is the sandbox.Engine on rootless Podman (4.3 and later), by
// its API. It also keeps the API service running, see service.
package podman

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/bindings/system"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Config of an Engine.
type Config struct {
	// Node is the id of the node, which labels its containers. Required.
	Node string
	// RunDir is the folder of the service that the node starts when there is
	// none, for podman.sock, podman.log, seccomp.json and doze-crun, and of what containers
	// have instead of files that Podman makes. Required; it must exist, outlive a
	// reboot, and sandboxes must not see it.
	RunDir string
	// Socket of a service that is used if it answers. Default: the user's own,
	// $XDG_RUNTIME_DIR/podman/podman.sock.
	Socket string
	// Command is the podman to start. Default: podman, from PATH.
	Command string
	// Helper is the program doze-netns, which is the OCI runtime of sandboxes. Required.
	Helper string
	// Log gets what the service writes. Default: slog.Default().
	Log *slog.Logger
}

// Engine makes containers with Podman. Its methods are documented at
// sandbox.Engine.
type Engine struct {
	node    string
	command string // podman
	profile string // of seccomp; empty for Podman's own choice
	files   files
	log     *slog.Logger
	service *service
	pulls   pulls
	// owned remembers which containers are of this node: sandbox.ID →
	// Podman's id of the container.
	owned sync.Map
	// quotas is held while a file of quotas is written.
	quotas sync.Mutex
}

// Open finds or starts an API service and returns when it answers.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Node == "" || cfg.RunDir == "" || cfg.Helper == "" {
		return nil, errors.New("podman: Node, RunDir and Helper are required")
	}
	run, err := filepath.Abs(cfg.RunDir)
	if err != nil {
		return nil, err
	}
	if cfg.Socket == "" {
		if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
			cfg.Socket = filepath.Join(dir, "podman", "podman.sock")
		}
	}
	if cfg.Command == "" {
		cfg.Command = "podman"
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	// Whoever runs the service, the namespace helper needs the command too.
	if _, err := exec.LookPath(cfg.Command); err != nil {
		return nil, fmt.Errorf("%w: %w: install Podman, or put its folder into PATH", sandbox.ErrEngineDown, err)
	}
	profile, err := writeProfile(run)
	if err != nil {
		return nil, fmt.Errorf("writing the seccomp profile: %w", err)
	}
	own := files{run: run}
	if err := own.prepare(cfg.Helper); err != nil {
		return nil, fmt.Errorf("making the sandboxes' files: %w", err)
	}
	e := &Engine{
		node:    cfg.Node,
		command: cfg.Command,
		profile: profile,
		files:   own,
		log:     cfg.Log,
		service: newService(cfg.Command, own.ociRuntime(), cfg.Socket, filepath.Join(run, "podman.sock"), cfg.Log),
	}
	e.service.start()
	if _, err := e.service.connection(ctx, startLimit); err != nil {
		e.service.close()
		return nil, err
	}
	return e, nil
}

// Close ends the service if it is the node's own. Containers go on.
func (e *Engine) Close() error {
	e.pulls.close()
	e.service.close()
	return nil
}

// How long a call may take. Beyond it the engine counts as down: Podman's
// locks may be held by a process that hangs.
const (
	callLimit = 2 * time.Minute
	// createLimit is longer: for the first container of an image Podman makes
	// a copy of it for the sandboxes' user ids, 2 s for 500 MB.
	createLimit = 10 * time.Minute
	// restartLimit is how long a call waits for a service that is being
	// started again, which takes 0.1 s, before it returns ErrEngineDown.
	restartLimit = 5 * time.Second
)

// do runs f, which makes one request. When the service goes away meanwhile, f is
// run once more after it has come back: every request of the engine may be
// repeated.
func (e *Engine) do(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	conn, err := e.service.connection(ctx, restartLimit)
	if err != nil {
		return err
	}
	err = e.once(ctx, limit, conn, f)
	if lost := (*lostError)(nil); !errors.As(err, &lost) {
		return err
	}
	if conn, err = e.service.connection(ctx, restartLimit); err != nil {
		return err
	}
	return e.once(ctx, limit, conn, f)
}

func (e *Engine) once(ctx context.Context, limit time.Duration, conn *connection, f func(ctx context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := conn.call(limited, f)
	if lost := (*lostError)(nil); errors.As(err, &lost) {
		e.service.report(conn)
	}
	if err != nil && ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w within %v", sandbox.ErrEngineDown, limit)
	}
	return err
}

// Ping returns nil when the service answers.
func (e *Engine) Ping(ctx context.Context) error {
	return e.do(ctx, pingLimit, func(ctx context.Context) error {
		client, err := bindings.GetClient(ctx)
		if err != nil {
			return err
		}
		resp, err := client.DoRequest(ctx, nil, http.MethodGet, "/_ping", nil, nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return resp.Process(nil)
	})
}

// StorageFolder is where Podman keeps containers and images.
func (e *Engine) StorageFolder(ctx context.Context) (folder string, err error) {
	err = e.do(ctx, callLimit, func(ctx context.Context) error {
		info, err := system.Info(ctx, nil)
		if err == nil && info.Store != nil {
			folder = info.Store.GraphRoot
		}
		return err
	})
	if err == nil && folder == "" {
		err = errors.New("podman does not say it")
	}
	if err != nil {
		return "", fmt.Errorf("find podman's storage: %w", err)
	}
	return folder, nil
}

var _ sandbox.Engine = (*Engine)(nil)
