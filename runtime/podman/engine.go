// Package podman implements sandbox.Engine with rootless Podman (4.3 and later), through its
// API. It also supervises the API service, see service.
package podman

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/containers/podman/v5/libpod/define"
	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/bindings/system"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Config of an Engine.
type Config struct {
	// Node is the id of the node, with which its containers are labeled. Required.
	Node string
	// RunDir is the folder of the engine's files: podman.sock and podman.log of a
	// service that it starts, seccomp.json, doze-crun, and the files that containers have
	// in place of Podman's. Required; it must exist, survive a reboot, and be invisible to
	// sandboxes.
	RunDir string
	// Socket of a service that is used if it responds. Default: the user's own,
	// $XDG_RUNTIME_DIR/podman/podman.sock.
	Socket string
	// Command is the podman to start. Default: podman, from PATH.
	Command string
	// Helper is the program doze-netns, which is the OCI runtime of sandboxes. Required.
	Helper string
	// Log receives the engine's messages and the service's output. Default:
	// slog.Default().
	Log *slog.Logger
}

// Engine runs containers with Podman. sandbox.Engine documents its methods. Create one with
// Open.
type Engine struct {
	node    string
	command string // podman
	profile string // path of the seccomp profile; empty for Podman's default
	files   files
	log     *slog.Logger
	service *service
	pulls   pulls
	// owned caches which containers belong to this node: sandbox.ID → Podman's id of the
	// container.
	owned sync.Map
	// quotas is locked while a file of quotas is written.
	quotas sync.Mutex
}

// Open finds or starts an API service and returns when it responds. The caller closes the
// Engine. Errors wrap sandbox.ErrEngineDown if Podman is missing or no service responds.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Node == "" || cfg.RunDir == "" || cfg.Helper == "" {
		return nil, errors.New("podman: Node, RunDir and Helper are required")
	}
	run, err := filepath.Abs(cfg.RunDir)
	if err != nil {
		return nil, err
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); cfg.Socket == "" && dir != "" {
		cfg.Socket = filepath.Join(dir, "podman", "podman.sock")
	}
	cfg.Command = cmp.Or(cfg.Command, "podman")
	cfg.Log = cmp.Or(cfg.Log, slog.Default())
	// Even with a service of the user's, the namespace helper needs the command.
	if _, err := exec.LookPath(cfg.Command); err != nil {
		return nil, fmt.Errorf("%w: %w; install Podman, or add its folder to PATH", sandbox.ErrEngineDown, err)
	}
	profile, err := writeProfile(run)
	if err != nil {
		return nil, fmt.Errorf("write the seccomp profile: %w", err)
	}
	own := files{run: run}
	if err := own.prepare(cfg.Helper); err != nil {
		return nil, fmt.Errorf("create the sandboxes' files: %w", err)
	}
	e := &Engine{
		node:    cfg.Node,
		command: cfg.Command,
		profile: profile,
		files:   own,
		log:     cfg.Log,
		service: &service{
			command: cfg.Command, runtime: own.ociRuntime(), shared: cfg.Socket, own: filepath.Join(run, "podman.sock"), log: cfg.Log,
		},
	}
	e.service.start()
	if _, err := e.service.connection(ctx, startLimit); err != nil {
		e.service.close()
		return nil, err
	}
	return e, nil
}

// Close ends the service if the node, or an earlier one on the same RunDir, started it.
// Containers continue to run.
func (e *Engine) Close() error {
	e.pulls.close()
	e.service.close()
	return nil
}

const (
	// callLimit is how long a call may take. After that the engine counts as down:
	// a process that hangs may hold Podman's locks.
	callLimit = 2 * time.Minute
	// createLimit is longer: for the first container of an image, Podman copies the
	// image for the sandboxes' user ids, which takes 2 s for 500 MB.
	createLimit = 10 * time.Minute
	// restartLimit is how long a call waits for the restart of a service, which takes
	// 0.1 s, before it returns ErrEngineDown.
	restartLimit = 5 * time.Second
)

// do runs f, which makes one request. If the service ends meanwhile, do runs f a second time
// after the service's restart: every request of the engine may be repeated.
func (e *Engine) do(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	err := e.once(ctx, limit, f)
	if _, lost := errors.AsType[*lostError](err); lost {
		return e.once(ctx, limit, f)
	}
	return err
}

// request is do for a request with a result.
func request[T any](ctx context.Context, e *Engine, f func(ctx context.Context) (T, error)) (result T, err error) {
	err = e.do(ctx, callLimit, func(ctx context.Context) (err error) {
		result, err = f(ctx)
		return err
	})
	return result, err
}

func (e *Engine) once(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	conn, err := e.service.connection(ctx, restartLimit)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = conn.call(limited, f)
	if _, lost := errors.AsType[*lostError](err); lost {
		e.service.report(conn)
	}
	if err != nil && ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w within %v", sandbox.ErrEngineDown, limit)
	}
	return err
}

// Ping returns nil if the service responds.
func (e *Engine) Ping(ctx context.Context) error {
	return e.do(ctx, pingLimit, func(ctx context.Context) error {
		client, err := bindings.GetClient(ctx)
		if err != nil {
			return err
		}
		return ping(ctx, client.Client)
	})
}

// Storage is where Podman stores containers and images.
type Storage struct {
	GraphRoot string // the folder that stays
	RunRoot   string // the folder that is emptied at a boot
	Driver    string // such as overlay
	Options   []string
	// Transient: RunRoot has the lists of containers and of their layers (transient_store in storage.conf).
	Transient bool
}

// Storage returns Podman's storage.
func (e *Engine) Storage(ctx context.Context) (Storage, error) {
	info, err := request(ctx, e, func(ctx context.Context) (*define.Info, error) { return system.Info(ctx, nil) })
	if err == nil && (info.Store == nil || info.Store.GraphRoot == "") {
		err = errors.New("podman info does not have it")
	}
	if err != nil {
		return Storage{}, fmt.Errorf("find podman's storage: %w", err)
	}
	return storageOf(info.Store), nil
}

func storageOf(info *define.StoreInfo) Storage {
	storage := Storage{GraphRoot: info.GraphRoot, RunRoot: info.RunRoot, Driver: info.GraphDriverName, Transient: info.TransientStore}
	for name, value := range info.GraphOptions {
		if text, ok := value.(string); ok {
			storage.Options = append(storage.Options, name+"="+text)
		}
	}
	return storage
}

var _ sandbox.Engine = (*Engine)(nil)
