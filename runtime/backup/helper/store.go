package helper

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/blob/s3"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/objectstore"
)

const (
	// blobTimeout bounds one request with its retries. A pack of 21 MB needs 175 KB/s.
	blobTimeout = 2 * time.Minute
	// listTimeout bounds a list of blobs. A gigabyte has some 50 blobs.
	listTimeout = 10 * time.Minute
	// maxRetries limits the attempts of Kopia's S3 client. Kopia's storage also retries most requests ten times.
	maxRetries = 4
	// packAttempts limits the attempts to upload a pack.
	packAttempts = 10
)

// store is the object store. It records the last failure, because Kopia may return another error instead.
type store struct {
	blob.Storage
	ctx  context.Context // of the operation
	sent atomic.Int64    // bytes

	packs          *minio.Client // nil in tests of the other storages
	bucket, prefix string
	wantsMD5       atomic.Bool // the object store refuses objects with another checksum

	mu     sync.Mutex
	failed *wire.Error
}

// openStore connects to the object store and checks that the bucket exists.
func openStore(ctx context.Context, s wire.Store) (*store, error) {
	minio.MaxRetry = maxRetries
	opened := &store{ctx: ctx, bucket: s.Bucket, prefix: s.Prefix}
	limited, cancel := opened.limit(ctx, blobTimeout)
	defer cancel()
	var err error
	opened.Storage, err = s3.New(limited, &s3.Options{
		BucketName: s.Bucket, Prefix: s.Prefix, Endpoint: s.Endpoint, DoNotUseTLS: !s.TLS,
		AccessKeyID: s.AccessKey, SecretAccessKey: s.SecretKey, Region: s.Region,
	}, false)
	if err != nil {
		return nil, opened.note(ctx, err)
	}
	opened.packs, err = minio.New(s.Endpoint, &minio.Options{
		Creds: credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""), Secure: s.TLS, Region: s.Region, MaxRetries: packAttempts,
	})
	if err != nil {
		return nil, opened.note(ctx, err)
	}
	// Kopia reports a missing bucket like a missing object. Listing the bucket distinguishes them.
	found := errors.New("found")
	err = opened.ListBlobs(ctx, formatBlob, func(blob.Metadata) error { return found })
	if err != nil && !errors.Is(err, found) {
		return nil, err
	}
	return opened, nil
}

// limit returns a context for a request. It ends with the operation, too: Kopia writes indexes and logs
// with contexts that do not end.
func (s *store) limit(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// note records a failure of the object store, and returns it as a *wire.Error (wrapped). It returns other
// errors, such as a missing blob, unchanged.
func (s *store) note(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || s.ctx.Err() != nil || errors.Is(err, blob.ErrBlobNotFound) || errors.Is(err, blob.ErrInvalidRange) {
		return err
	}
	classified := objectstore.Classify(err)
	failure := &wire.Error{Code: wire.Code(classified.Code), Message: classified.Message}
	if errors.Is(err, blob.ErrInvalidCredentials) {
		failure.Code = wire.Denied
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = failure
	return fmt.Errorf("%w", failure)
}

// failure returns the last failure that note recorded, or nil.
func (s *store) failure() *wire.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// GetBlob implements blob.Storage.
func (s *store) GetBlob(ctx context.Context, id blob.ID, offset, length int64, output blob.OutputBuffer) error {
	limited, cancel := s.limit(ctx, blobTimeout)
	defer cancel()
	return s.note(ctx, s.Storage.GetBlob(limited, id, offset, length, output))
}

// GetMetadata implements blob.Storage.
func (s *store) GetMetadata(ctx context.Context, id blob.ID) (blob.Metadata, error) {
	limited, cancel := s.limit(ctx, blobTimeout)
	defer cancel()
	metadata, err := s.Storage.GetMetadata(limited, id)
	return metadata, s.note(ctx, err)
}

// PutBlob implements blob.Storage.
func (s *store) PutBlob(ctx context.Context, id blob.ID, data blob.Bytes, opts blob.PutOptions) error {
	limited, cancel := s.limit(ctx, blobTimeout)
	defer cancel()
	var err error
	if isPack(id) && opts == (blob.PutOptions{}) && s.packs != nil && !s.wantsMD5.Load() {
		err = s.putPack(limited, id, data)
	} else {
		err = s.Storage.PutBlob(limited, id, data, opts)
	}
	if err == nil {
		s.sent.Add(int64(data.Length()))
	}
	return s.note(ctx, err)
}

// isPack reports whether a blob has content: of files, or of folders and manifests.
func isPack(id blob.ID) bool {
	return strings.HasPrefix(string(id), "p") || strings.HasPrefix(string(id), "q")
}

// putPack uploads a pack with a CRC-32C, which hardware computes 30 times as fast as the MD5 that Kopia sends. Object
// stores that know only MD5 ignore it, unless the bucket demands a checksum: then they get the MD5.
func (s *store) putPack(ctx context.Context, id blob.ID, data blob.Bytes) error {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := data.WriteTo(sum); err != nil {
		return err
	}
	content := data.Reader()
	defer content.Close()
	_, err := s.packs.PutObject(ctx, s.bucket, s.prefix+string(id), content, int64(data.Length()), minio.PutObjectOptions{
		ContentType: "application/x-kopia", DisableMultipart: true,
		UserMetadata: map[string]string{"X-Amz-Checksum-Crc32c": base64.StdEncoding.EncodeToString(sum.Sum(nil))},
	})
	if response, ok := errors.AsType[minio.ErrorResponse](err); ok && response.StatusCode == http.StatusBadRequest {
		s.wantsMD5.Store(true)
		return s.Storage.PutBlob(ctx, id, data, blob.PutOptions{})
	}
	return err
}

// DeleteBlob implements blob.Storage.
func (s *store) DeleteBlob(ctx context.Context, id blob.ID) error {
	limited, cancel := s.limit(ctx, blobTimeout)
	defer cancel()
	return s.note(ctx, s.Storage.DeleteBlob(limited, id))
}

// ListBlobs implements blob.Storage.
func (s *store) ListBlobs(ctx context.Context, prefix blob.ID, f func(blob.Metadata) error) error {
	limited, cancel := s.limit(ctx, listTimeout)
	defer cancel()
	var stopped error
	err := s.Storage.ListBlobs(limited, prefix, func(m blob.Metadata) error {
		stopped = f(m)
		return stopped
	})
	if stopped != nil {
		return err
	}
	return s.note(ctx, err)
}
