// Package registry uploads container images to registries.
//
// The protocol is https://github.com/opencontainers/distribution-spec/blob/main/spec.md.
package registry

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/retry"

	"github.com/doze-run/doze/archive/ociimage"
)

const (
	// concurrentUploads limits the uploads at the same time. Podman has 6 and Docker has 5; snapshots
	// have few large layers.
	concurrentUploads = 3
	// maxAttempts limits the attempts of an upload after failures of the network or the registry, 1.75 s
	// in total.
	maxAttempts = 4
	// maxConfig limits the size of an image's configuration, which is in memory.
	maxConfig = 4 << 20
	// maxRedirects is the limit of net/http.
	maxRedirects = 10
	// responseWait is how long a registry may take to respond after it has received a request. Registries verify a layer of
	// many gigabytes before they respond.
	responseWait = 10 * time.Minute
)

// Config configures Open.
type Config struct {
	Reference Reference
	// SkipTLSVerify permits certificates that are not trusted, and HTTP if the registry does not
	// speak HTTPS. HTTP is always permitted on loopback.
	SkipTLSVerify bool
	// Getenv returns the environment variables that name the files with credentials and certificates,
	// and the folder for temporary files. Required.
	Getenv    func(string) string
	UserAgent string // default: doze
	// Uploaded is called concurrently with numbers of bytes of layers that were sent. May be nil.
	Uploaded func(int)

	dial func(ctx context.Context, network, address string) (net.Conn, error) // of tests
}

// Repository is a repository of a registry that responds.
type Repository struct {
	cfg     Config
	files   []authFile
	found   foundCredentials
	remote  *remote.Repository
	uploads chan struct{} // a semaphore
	sent    atomic.Int64
}

// Open finds the user's credentials for a repository, and connects to its registry. It tries HTTPS
// first, and HTTP only if the configuration permits that. The caller must call Close.
func Open(ctx context.Context, cfg Config) (*Repository, error) {
	r := &Repository{cfg: cfg, files: authFiles(cfg.Getenv), uploads: make(chan struct{}, concurrentUploads)}
	var err error
	if r.found, err = findCredentials(ctx, r.files, cfg.Reference); err != nil {
		return nil, err
	}
	roots, err := trustedRoots(cfg.Getenv, cfg.Reference.Registry)
	if err != nil {
		return nil, err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(true) // as transfers of api/client; HTTP/2 is slower, and has other errors
	transport.TLSClientConfig = &tls.Config{RootCAs: roots, InsecureSkipVerify: cfg.SkipTLSVerify}
	transport.ResponseHeaderTimeout = responseWait
	if cfg.dial != nil {
		transport.DialContext = cfg.dial
	}
	r.remote = &remote.Repository{Reference: cfg.Reference.oras()}
	httpClient := &http.Client{Transport: transport, CheckRedirect: r.checkRedirect}
	r.remote.Client = &auth.Client{
		Client: httpClient,
		Header: http.Header{"User-Agent": {cmp.Or(cfg.UserAgent, "doze")}},
		Cache:  auth.NewCache(),
		Credential: func(_ context.Context, host string) (auth.Credential, error) {
			if host != cfg.Reference.host() {
				return auth.EmptyCredential, nil
			}
			return r.found.Credential, nil
		},
	}
	if err := r.connect(ctx, httpClient); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Close closes idle connections.
func (r *Repository) Close() {
	r.remote.Client.(*auth.Client).Client.CloseIdleConnections()
}

// checkRedirect refuses to leave HTTPS.
func (r *Repository) checkRedirect(req *http.Request, via []*http.Request) error {
	if !r.remote.PlainHTTP && req.URL.Scheme != "https" {
		return fmt.Errorf("the registry redirects from HTTPS to %s://%s", req.URL.Scheme, req.URL.Host)
	}
	if len(via) >= maxRedirects {
		return fmt.Errorf("the registry redirects more than %d times", maxRedirects)
	}
	return nil
}

// connect finds out whether the registry speaks HTTPS or, if permitted, HTTP.
func (r *Repository) connect(ctx context.Context, c *http.Client) error {
	probe := func() error { return r.probe(ctx, c) }
	err := retryTemporary(ctx, probe)
	_, distrusted := errors.AsType[*tls.CertificateVerificationError](err)
	_, responded := errors.AsType[*statusError](err)
	permitted := r.cfg.SkipTLSVerify || r.cfg.Reference.isLoopback()
	if err == nil || ctx.Err() != nil || distrusted || responded || !permitted {
		return r.explain("connect to "+r.cfg.Reference.Registry, err)
	}
	r.remote.PlainHTTP = true
	plain := retryTemporary(ctx, probe)
	if plain == nil {
		return nil
	}
	r.remote.PlainHTTP = false
	if errors.Is(err, http.ErrSchemeMismatch) { // it speaks HTTP
		err = plain
	}
	return r.explain("connect to "+r.cfg.Reference.Registry, err)
}

// statusError is a response of a server that is not a registry, or that fails.
type statusError struct {
	code   int
	status string
}

func (e *statusError) Error() string { return "it responds " + e.status + " to GET /v2/" }

// probe requests the API's version, which needs no credentials.
func (r *Repository) probe(ctx context.Context, c *http.Client) error {
	u := url.URL{Scheme: "https", Host: r.cfg.Reference.host(), Path: "/v2/"}
	if r.remote.PlainHTTP {
		u.Scheme = "http"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK, http.StatusUnauthorized, http.StatusForbidden:
		return nil
	}
	return &statusError{resp.StatusCode, resp.Status}
}

// trustedRoots returns the system's certificate authorities and the registry's, from the folders that
// Podman and Docker read them from. See
// https://github.com/containers/image/blob/main/docs/containers-certs.d.5.md.
func trustedRoots(getenv func(string) string, host string) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	folders := []string{"/etc/containers/certs.d", "/etc/docker/certs.d"}
	if home := homeFolder(getenv); home != "" {
		folders = append(folders, userCertificates(home))
	}
	for _, folder := range folders {
		entries, _ := os.ReadDir(filepath.Join(folder, host)) // most registries have none
		for _, e := range entries {
			if filepath.Ext(e.Name()) != ".crt" {
				continue
			}
			file := filepath.Join(folder, host, e.Name())
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			if !pool.AppendCertsFromPEM(text) {
				return nil, fmt.Errorf("%s has no certificate", file)
			}
		}
	}
	return pool, nil
}

// userCertificates returns the folder with the user's folders of certificates for registries.
func userCertificates(home string) string {
	return filepath.Join(home, ".config", "containers", "certs.d")
}

// Pushed describes an image that was pushed.
type Pushed struct {
	Name   string // REGISTRY/REPOSITORY@DIGEST
	Digest digest.Digest
	Sent   int64 // bytes of layers that the registry did not have
}

// Push uploads the image of an archive that ociimage.Write has written, and sets the tag. It reads
// the archive without waiting for the uploads of layers, and stores compressed layers in temporary files
// meanwhile. Blobs that the registry has are not uploaded. After an error, the tag is unchanged.
// Push must not be called twice.
func (r *Repository) Push(ctx context.Context, archive io.Reader) (Pushed, error) {
	// One token serves all requests.
	ctx = auth.AppendRepositoryScope(ctx, r.remote.Reference, auth.ActionPull, auth.ActionPush)
	image, err := r.pushBlobs(ctx, archive)
	if err != nil {
		return Pushed{}, err
	}
	content, err := json.Marshal(image)
	if err != nil {
		return Pushed{}, err
	}
	manifest := descriptor(v1.MediaTypeImageManifest, content)
	err = retryTemporary(ctx, func() error {
		return r.remote.PushReference(ctx, manifest, bytes.NewReader(content), r.cfg.Reference.Tag)
	})
	if err != nil {
		return Pushed{}, r.explain("set tag "+r.cfg.Reference.Tag+" at "+r.cfg.Reference.Registry, err)
	}
	name := r.cfg.Reference.Registry + "/" + r.cfg.Reference.Repository + "@" + manifest.Digest.String()
	return Pushed{Name: name, Digest: manifest.Digest, Sent: r.sent.Load()}, nil
}

func descriptor(mediaType string, content []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// pushBlobs uploads the configuration and the layers, and returns the manifest.
func (r *Repository) pushBlobs(ctx context.Context, archive io.Reader) (v1.Manifest, error) {
	image := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	var contents ociimage.Contents
	compressed := map[digest.Digest]v1.Descriptor{} // by the digests of the uncompressed layers
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	uploads, ctx := errgroup.WithContext(ctx)
	folder := TemporaryFolder(r.cfg.Getenv)
	err := ociimage.Read(&endingReader{ctx, archive}, ociimage.Visitor{
		Image: func(c ociimage.Contents) error {
			contents = c
			for _, d := range c.Layers {
				compressed[d] = v1.Descriptor{}
			}
			return nil
		},
		Blob: func(d digest.Digest, content io.Reader) error {
			if d == contents.Config {
				text, err := io.ReadAll(io.LimitReader(content, maxConfig+1))
				if err == nil && len(text) > maxConfig {
					err = fmt.Errorf("the configuration of the image has more than %d MiB", maxConfig>>20)
				}
				if err != nil {
					return err
				}
				image.Config = descriptor(v1.MediaTypeImageConfig, text)
				// Before the layers, so that a user who must not push learns that soon.
				_, err = r.upload(ctx, image.Config, func() io.Reader { return bytes.NewReader(text) })
				return err
			}
			if _, ok := compressed[d]; !ok {
				return nil // the manifest of the uncompressed image
			}
			l, err := spool(folder, content)
			if errors.Is(err, syscall.ENOSPC) {
				return fmt.Errorf("%w; set TMPDIR to a folder with space for the compressed image", err)
			}
			if err != nil {
				return err
			}
			compressed[d] = l.Descriptor
			uploads.Go(func() error {
				defer l.close()
				sent, err := r.upload(ctx, l.Descriptor, func() io.Reader { return l.content(r.cfg.Uploaded) })
				if sent {
					r.sent.Add(l.Size)
				}
				return err
			})
			return nil
		},
	})
	if err != nil {
		cancel()
	}
	// An upload that fails ends the context, and with it the reader.
	if failed := uploads.Wait(); failed != nil && (err == nil || errors.Is(err, context.Canceled)) {
		err = failed
	}
	if err != nil {
		return image, err
	}
	if image.Config.Digest == "" {
		return image, errors.New("the archive does not have the configuration of its image")
	}
	for _, d := range contents.Layers {
		if compressed[d].Digest == "" {
			return image, fmt.Errorf("the archive does not have layer %s", d)
		}
		image.Layers = append(image.Layers, compressed[d])
	}
	return image, nil
}

// endingReader fails when its context ends.
type endingReader struct {
	ctx context.Context
	io.Reader
}

func (r *endingReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// upload uploads a blob that the registry does not have, and reports whether it has done so. content returns the same content
// each time.
func (r *Repository) upload(ctx context.Context, blob v1.Descriptor, content func() io.Reader) (sent bool, err error) {
	select {
	case r.uploads <- struct{}{}:
		defer func() { <-r.uploads }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	err = retryTemporary(ctx, func() error {
		exists, err := r.remote.Blobs().Exists(ctx, blob)
		if exists || err != nil {
			return err
		}
		err = r.remote.Blobs().Push(ctx, blob, content())
		sent = err == nil
		return err
	})
	return sent, r.explain("upload "+blob.Digest.String()+" to "+r.cfg.Reference.Registry, err)
}

// retryTemporary calls f again after temporary errors.
func retryTemporary(ctx context.Context, f func() error) error {
	for attempt := 0; ; attempt++ {
		err := f()
		if err == nil || !isTemporary(err) || attempt == maxAttempts-1 {
			return err
		}
		select {
		case <-time.After(retry.DefaultBackoff(attempt, nil)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
