package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync/atomic"

	"github.com/doze-run/doze/archive/ociimage/registry"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/cmd/internal/version"
)

// parseRegistryDestination parses the image of a destination in a registry.
func (a *app) parseRegistryDestination(to destination) (destination, error) {
	name, ok := strings.CutPrefix(to.path, "//")
	if !ok {
		return to, usage.Errorf("\"docker:%s\" has no slashes before the registry; use docker://registry.example.com/shop:1, for example", to.path)
	}
	var err error
	if to.image, err = registry.ParseReference(name); err != nil {
		return to, usage.Errorf("docker://%s: %v", name, err)
	}
	return to, nil
}

// pushToRegistry uploads the image of the archive that open returns. It connects to the registry before
// it calls open.
func (a *app) pushToRegistry(ctx context.Context, to destination, skipVerify bool, open func() (io.ReadCloser, error)) error {
	p := &pushing{progress: newProgress(a.err)}
	defer p.progress.clear()
	repository, err := registry.Open(ctx, registry.Config{
		Reference: to.image, SkipTLSVerify: skipVerify, Getenv: a.getenv, UserAgent: "doze/" + version.String(), Uploaded: p.addSent,
	})
	if err != nil {
		return err
	}
	defer repository.Close()
	archive, err := open()
	if err != nil {
		return err
	}
	defer archive.Close()
	pushed, err := repository.Push(ctx, io.TeeReader(archive, p))
	p.progress.clear()
	result := map[string]any{
		"destination": to.transport + ":" + to.path, "image": pushed.Name, "digest": pushed.Digest, "bytes": p.read.Load(), "uploaded_bytes": pushed.Sent,
	}
	return a.print(err, result, "%s  %s uploaded", pushed.Name, size(pushed.Sent))
}

// pushing shows the progress of a push. The compressed layers that it sends are smaller than what it
// reads.
type pushing struct {
	progress   *progress
	read, sent atomic.Int64
}

func (p *pushing) Write(b []byte) (int, error) {
	p.read.Add(int64(len(b)))
	p.show()
	return len(b), nil
}

func (p *pushing) addSent(n int) {
	p.sent.Add(int64(n))
	p.show()
}

func (p *pushing) show() {
	p.progress.show(fmt.Sprintf("read %s, uploaded %s", size(p.read.Load()), size(p.sent.Load())))
}
