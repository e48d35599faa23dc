//go:build integration

package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/errdef"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/archive/ociimage/registry/registrytest"
	"github.com/doze-run/doze/testkit"
)

// layerSize exceeds the buffers between a client and a registry.
const layerSize = 8 << 20

// image returns an image with a layer of layerSize for each seed. Layers of equal seeds are equal.
func image(t *testing.T, seeds ...byte) ociimage.Image {
	t.Helper()
	config := v1.Image{RootFS: v1.RootFS{Type: "layers"}}
	config.OS, config.Author = "linux", fmt.Sprint(seeds)
	img := ociimage.Image{Name: "localhost/shop:1"}
	for _, seed := range seeds {
		layer, err := ociimage.Measure(func(w io.Writer) error {
			out := tar.NewWriter(w)
			err := out.WriteHeader(&tar.Header{Name: fmt.Sprint("file-", seed), Mode: 0o600, Size: layerSize})
			if err == nil {
				_, err = io.CopyN(out, rand.NewChaCha8([32]byte{seed}), layerSize)
			}
			return errors.Join(err, out.Close())
		})
		testkit.NoError(t, "measure", err)
		img.Layers = append(img.Layers, layer)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, layer.Digest)
	}
	var err error
	img.Config, err = json.Marshal(config)
	testkit.NoError(t, "encode", err)
	return img
}

// archive returns the archive of an image.
func archive(t *testing.T, img ociimage.Image) *bytes.Reader {
	t.Helper()
	var b bytes.Buffer
	testkit.NoError(t, "write the archive", ociimage.Write(&b, img))
	return bytes.NewReader(b.Bytes())
}

// pusher is a user with a registry and a folder for temporary files.
type pusher struct {
	userFolders
	t      *testing.T
	server *registrytest.Server
}

func newPusher(t *testing.T) *pusher {
	t.Helper()
	p := &pusher{newUser(t), t, registrytest.Start(t)}
	p.env["REGISTRY_AUTH_FILE"] = p.server.AuthFile(t, p.server.Password)
	p.env["TMPDIR"] = t.TempDir()
	t.Cleanup(func() {
		if left, err := os.ReadDir(p.env["TMPDIR"]); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	})
	return p
}

func (p *pusher) open(repository, tag string) *Repository {
	p.t.Helper()
	r, err := Open(testkit.Context(p.t), Config{Reference: Reference{p.server.Host, repository, tag}, Getenv: p.getenv})
	testkit.NoError(p.t, "open", err)
	p.t.Cleanup(r.Close)
	return r
}

func (p *pusher) push(tag string, img ociimage.Image) (Pushed, error) {
	p.t.Helper()
	return p.open("team/shop", tag).Push(testkit.Context(p.t), archive(p.t, img))
}

// read reads the image of a tag or digest from the registry, with verified digests.
func (p *pusher) read(reference string) (d digest.Digest, manifest v1.Manifest, config v1.Image, layers [][]byte) {
	p.t.Helper()
	r := p.open("team/shop", "any")
	ctx := testkit.Context(p.t)
	fetch := func(d v1.Descriptor, from func(context.Context, v1.Descriptor) (io.ReadCloser, error)) []byte {
		p.t.Helper()
		body, err := from(ctx, d)
		testkit.NoError(p.t, "fetch", err)
		defer body.Close()
		content, err := io.ReadAll(body)
		testkit.NoError(p.t, "read", err)
		if digest.FromBytes(content) != d.Digest || int64(len(content)) != d.Size {
			p.t.Errorf("%+v has the digest %s", d, digest.FromBytes(content))
		}
		return content
	}
	described, err := r.remote.Resolve(ctx, reference)
	testkit.NoError(p.t, "resolve", err)
	testkit.NoError(p.t, "decode", json.Unmarshal(fetch(described, r.remote.Manifests().Fetch), &manifest))
	testkit.NoError(p.t, "decode", json.Unmarshal(fetch(manifest.Config, r.remote.Blobs().Fetch), &config))
	for _, layer := range manifest.Layers {
		in, err := gzip.NewReader(bytes.NewReader(fetch(layer, r.remote.Blobs().Fetch)))
		testkit.NoError(p.t, "decompress", err)
		content, err := io.ReadAll(in)
		testkit.NoError(p.t, "decompress", err)
		layers = append(layers, content)
	}
	return described.Digest, manifest, config, layers
}

// expectNoTag checks that a failed push has set no tag.
func (p *pusher) expectNoTag(tag string) {
	p.t.Helper()
	if _, err := p.open("team/shop", "any").remote.Resolve(testkit.Context(p.t), tag); !errors.Is(err, errdef.ErrNotFound) {
		p.t.Errorf("tag %s: %v", tag, err)
	}
}

func TestPushedImageHasTheLayersOfItsArchive(t *testing.T) {
	p := newPusher(t)
	img := image(t, 1, 2, 1)
	pushed, err := p.push("1", img)
	testkit.NoError(t, "push", err)
	for _, reference := range []string{"1", pushed.Digest.String()} {
		d, manifest, config, layers := p.read(reference)
		if d != pushed.Digest || pushed.Name != p.server.Host+"/team/shop@"+d.String() {
			t.Errorf("%s has the digest %s, pushed %+v", reference, d, pushed)
		}
		if manifest.MediaType != v1.MediaTypeImageManifest || manifest.Config.MediaType != v1.MediaTypeImageConfig || manifest.Layers[0].MediaType != v1.MediaTypeImageLayerGzip {
			t.Errorf("manifest %+v", manifest)
		}
		var digests []digest.Digest
		for _, content := range layers {
			digests = append(digests, digest.FromBytes(content))
		}
		testkit.Diff(t, "layers", digests, config.RootFS.DiffIDs)
		if config.Author != "[1 2 1]" {
			t.Errorf("configuration %+v", config)
		}
	}
	if blobs, content := p.server.Uploaded(); blobs != 3 || content < pushed.Sent || pushed.Sent < 2*layerSize {
		t.Errorf("%d blobs with %d bytes were uploaded, %d reported", blobs, content, pushed.Sent)
	}
}

// TestPushUploadsNoBlobThatTheRegistryHas: an image on the same base uploads its own layer alone.
func TestPushUploadsNoBlobThatTheRegistryHas(t *testing.T) {
	p := newPusher(t)
	first, err := p.push("1", image(t, 1, 2, 3))
	testkit.NoError(t, "push", err)
	p.server.Uploaded()
	second, err := p.push("2", image(t, 1, 2, 4))
	testkit.NoError(t, "push", err)
	blobs, content := p.server.Uploaded()
	if blobs != 2 || content < layerSize || content > layerSize+layerSize/2 || second.Sent > content {
		t.Errorf("%d blobs with %d bytes were uploaded, want the configuration and one layer; %d reported", blobs, content, second.Sent)
	}
	again, err := p.push("3", image(t, 1, 2, 3))
	testkit.NoError(t, "push", err)
	if blobs, content := p.server.Uploaded(); blobs != 0 || content != 0 || again.Sent != 0 || again.Digest != first.Digest {
		t.Errorf("%d blobs with %d bytes were uploaded for an image that the registry has; pushed %+v", blobs, content, again)
	}
}

func TestRefusedCredentialsAreNamed(t *testing.T) {
	p := newPusher(t)
	right, wrong := p.env["REGISTRY_AUTH_FILE"], p.server.AuthFile(t, "wrong")
	for file, want := range map[string]string{
		wrong:             fmt.Sprintf("%s does not permit the push to team/shop: it refused user pusher of %s; run `podman login %[1]s`", p.server.Host, wrong),
		right + "missing": fmt.Sprintf("%s does not permit the push to team/shop: no credentials for %[1]s in %s; run `podman login %[1]s`", p.server.Host, right+"missing"),
	} {
		p.env["REGISTRY_AUTH_FILE"] = file
		if _, err := p.push("1", image(t, 1)); err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "wrong\"") {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	if blobs, content := p.server.Uploaded(); blobs != 0 || content != 0 {
		t.Errorf("%d blobs with %d bytes were uploaded", blobs, content)
	}
}

// afterHalf returns a function for Fail that calls fail when half of a layer was uploaded.
func afterHalf(fail func(registrytest.Upload) bool) func(registrytest.Upload) bool {
	return func(u registrytest.Upload) bool { return u.Read >= layerSize/2 && fail(u) }
}

func TestUploadThatBreaksOffIsRepeated(t *testing.T) {
	p := newPusher(t)
	broken := make(chan struct{}, 1)
	p.server.Fail(afterHalf(func(registrytest.Upload) bool {
		select {
		case broken <- struct{}{}:
			return true
		default:
			return false
		}
	}))
	pushed, err := p.push("1", image(t, 1, 2))
	testkit.NoError(t, "push", err)
	if len(broken) != 1 {
		t.Error("no upload broke off")
	}
	unbroken, err := newPusher(t).push("1", image(t, 1, 2))
	testkit.NoError(t, "push without faults", err)
	if pushed.Sent != unbroken.Sent {
		t.Errorf("%d bytes were uploaded, without faults %d", pushed.Sent, unbroken.Sent)
	}
	if _, _, config, layers := p.read("1"); digest.FromBytes(layers[0]) != config.RootFS.DiffIDs[0] {
		t.Error("the layer differs")
	}
}

func TestPushFailsIfEachUploadBreaksOff(t *testing.T) {
	p := newPusher(t)
	p.server.Fail(afterHalf(func(registrytest.Upload) bool { return true }))
	if _, err := p.push("1", image(t, 1)); err == nil || !strings.HasPrefix(err.Error(), "upload sha256:") || !strings.Contains(err.Error(), " to "+p.server.Host+": ") {
		t.Errorf("error %v", err)
	}
	p.server.Fail(nil)
	p.expectNoTag("1")
	_, err := p.push("1", image(t, 1))
	testkit.NoError(t, "push again", err)
}

func TestPushFailsIfTheRegistryDies(t *testing.T) {
	p := newPusher(t)
	p.server.Fail(afterHalf(func(registrytest.Upload) bool {
		p.server.Kill()
		return true
	}))
	if _, err := p.push("1", image(t, 1, 2)); err == nil || !strings.HasPrefix(err.Error(), "upload sha256:") || errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// stall makes uploads of layers wait until the test ends, and returns a channel that is closed when one waits.
func (p *pusher) stall() <-chan struct{} {
	waits, ended := make(chan struct{}, 1), p.t.Context().Done()
	first := make(chan struct{})
	waits <- struct{}{}
	p.server.Fail(afterHalf(func(u registrytest.Upload) bool {
		select {
		case <-waits:
			close(first)
		default:
		}
		select {
		case <-ended:
		case <-u.Request.Context().Done():
		}
		return true
	}))
	return first
}

// TestPushReadsTheArchiveWhileUploadsStall: a node disconnects a client that does not read.
func TestPushReadsTheArchiveWhileUploadsStall(t *testing.T) {
	p := newPusher(t)
	waits := p.stall()
	ctx, cancel := context.WithCancel(testkit.Context(t))
	defer cancel()
	in, out := io.Pipe()
	wrote, pushed := make(chan error, 1), make(chan error, 1)
	go func() { // ends with the push
		wrote <- ociimage.Write(out, image(t, 1, 2, 3, 4, 5, 6))
		out.Close()
	}()
	r := p.open("team/shop", "1")
	go func() {
		_, err := r.Push(ctx, in)
		in.CloseWithError(err)
		pushed <- err
	}()
	testkit.Closed(t, "an upload waits", waits)
	testkit.NoError(t, "write", testkit.Receive(t, "the archive is read", wrote))
	cancel()
	testkit.ErrorIs(t, "push", testkit.Receive(t, "the push ends", pushed), context.Canceled)
	p.server.Fail(nil)
	p.expectNoTag("1")
}

func TestArchiveThatBreaksOffIsNotPushed(t *testing.T) {
	p := newPusher(t)
	whole := archive(t, image(t, 1, 2))
	push := func(content io.Reader) error {
		_, err := p.open("team/shop", "1").Push(testkit.Context(t), content)
		p.expectNoTag("1")
		return err
	}
	testkit.ErrorIs(t, "push", push(io.NewSectionReader(whole, 0, whole.Size()*3/4)), io.ErrUnexpectedEOF)
	broken := errors.New("the node has ended")
	testkit.ErrorIs(t, "push", push(io.MultiReader(io.NewSectionReader(whole, 0, whole.Size()/4), failing{broken})), broken)
	if err := push(strings.NewReader("")); err == nil {
		t.Error("an empty archive was pushed")
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

func TestMissingTemporaryFolderIsNamed(t *testing.T) {
	p := newPusher(t)
	missing := p.env["TMPDIR"] + "/missing"
	r := p.open("team/shop", "1")
	p.env["TMPDIR"] = missing
	defer func() { p.env["TMPDIR"] = strings.TrimSuffix(missing, "/missing") }()
	if _, err := r.Push(testkit.Context(t), archive(t, image(t, 1))); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("error %v", err)
	}
}
