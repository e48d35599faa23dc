package podman

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/containers/podman/v5/pkg/bindings/images"

	"github.com/doze-run/doze/runtime/sandbox"
)

// pullLimit is how long one pull may take.
const pullLimit = 30 * time.Minute

// EnsureImage implements sandbox.Engine. It pulls ref if it is missing. Images of
// localhost, which are built on this machine, are never pulled.
func (e *Engine) EnsureImage(ctx context.Context, ref string, progress func(line string)) error {
	exists, err := request(ctx, e, func(ctx context.Context) (bool, error) { return images.Exists(ctx, ref, nil) })
	if err != nil {
		return fmt.Errorf("find image %s: %w", ref, err)
	}
	if exists {
		return nil
	}
	if strings.HasPrefix(ref, "localhost/") {
		return &sandbox.ImageNotBuiltError{Ref: ref}
	}
	err = e.pulls.join(ctx, ref, progress, func(ctx context.Context, out *lines) error {
		return e.pull(ctx, ref, out)
	})
	if err != nil {
		return fmt.Errorf("pull %s: %w", ref, err)
	}
	return nil
}

// pull is not repeated if the service ends: its callers receive the error.
func (e *Engine) pull(ctx context.Context, ref string, out *lines) error {
	err := e.once(ctx, pullLimit, func(ctx context.Context) error {
		pulled, err := images.Pull(ctx, ref, new(images.PullOptions).WithProgressWriter(out).
			WithSkipTLSVerify(onLoopback(ref)))
		if err == nil && len(pulled) == 0 { // as the bindings do when ctx ends
			return cmp.Or(ctx.Err(), errors.New("the engine returned no pulled image"))
		}
		return err
	})
	if err == nil || errors.Is(err, sandbox.ErrEngineDown) || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w: %s", sandbox.ErrImageMissing, oneLine(err.Error()))
}

// onLoopback reports whether the image is in a registry on this machine, which may use plain
// HTTP, because its traffic does not leave the machine.
func onLoopback(ref string) bool {
	registry, _, _ := strings.Cut(ref, "/")
	host, _, err := net.SplitHostPort(registry)
	if err != nil {
		return false // localhost without a port is not a registry
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// oneLine returns a text on one line, truncated to maxLine bytes.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return text[:min(len(text), maxLine)]
}
