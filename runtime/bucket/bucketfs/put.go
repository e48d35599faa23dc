package bucketfs

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
)

const (
	// partSize is the size of a part of an upload. An upload reads parts from the scratch file
	// while it sends them, so memory does not depend on it.
	partSize = 16 << 20
	// maxParts is S3's limit.
	maxParts = 10_000
	// partThreads is the number of parts that an upload sends concurrently.
	partThreads = 4
)

// putMarker creates an empty object.
func (s *store) putMarker(ctx context.Context, key string) error {
	return s.requests.do(ctx, requestTimeout, func(ctx context.Context) error {
		_, err := s.core.PutObject(ctx, s.bucket, key, strings.NewReader(""), 0, "", "", minio.PutObjectOptions{})
		return err
	})
}

// put uploads an object. It uses memory for buffers of connections only.
func (s *store) put(ctx context.Context, key string, r io.ReaderAt, size int64) (object, error) {
	var info minio.UploadInfo
	var err error
	if size <= partSize {
		err = s.transfer(ctx, r, 0, size, func(ctx context.Context, body io.Reader) error {
			info, err = s.core.PutObject(ctx, s.bucket, key, body, size, "", "", minio.PutObjectOptions{})
			return err
		})
	} else {
		info, err = s.putParts(ctx, key, r, size)
	}
	return object{size: size, etag: strings.Trim(info.ETag, `"`), mtime: time.Now().Truncate(time.Second)}, err
}

// transfer calls f with a slot and with a reader of n bytes from an offset, and cancels f when the
// reader makes no progress.
func (s *store) transfer(ctx context.Context, r io.ReaderAt, off, n int64, f func(context.Context, io.Reader) error) error {
	if err := s.transfers.acquire(ctx); err != nil {
		return err
	}
	defer s.transfers.releaseSlot()
	ctx, w := newWatchdog(ctx)
	defer w.stop()
	return f(ctx, &watchedSection{io.NewSectionReader(r, off, n), w})
}

// watchedSection reports reads to a watchdog. minio-go seeks it before it retries.
type watchedSection struct {
	section *io.SectionReader
	w       *watchdog
}

func (s *watchedSection) Read(p []byte) (int, error) {
	s.w.progress()
	return s.section.Read(p)
}

func (s *watchedSection) Seek(off int64, whence int) (int64, error) {
	return s.section.Seek(off, whence)
}

// putParts uploads an object in parts. minio-go's function leaks goroutines when a part fails.
func (s *store) putParts(ctx context.Context, key string, r io.ReaderAt, size int64) (info minio.UploadInfo, err error) {
	var id string
	err = s.requests.do(ctx, requestTimeout, func(ctx context.Context) error {
		id, err = s.core.NewMultipartUpload(ctx, s.bucket, key, minio.PutObjectOptions{})
		return err
	})
	if err != nil {
		return info, err
	}
	defer func() {
		if err != nil {
			s.abort(ctx, key, id)
		}
	}()
	length := max(partSize, (size+maxParts-1)/maxParts)
	parts := make([]minio.CompletePart, (size+length-1)/length)
	group, partsCtx := errgroup.WithContext(ctx)
	group.SetLimit(partThreads)
	for i := range parts {
		group.Go(func() error {
			off := int64(i) * length
			n := min(length, size-off)
			return s.transfer(partsCtx, r, off, n, func(ctx context.Context, body io.Reader) error {
				part, err := s.core.PutObjectPart(ctx, s.bucket, key, id, i+1, body, n, minio.PutObjectPartOptions{})
				parts[i] = minio.CompletePart{PartNumber: i + 1, ETag: part.ETag}
				return err
			})
		})
	}
	if err := group.Wait(); err != nil {
		return info, err
	}
	timeout := requestTimeout + time.Duration(size/copyRate)*time.Second
	err = s.transfers.do(ctx, timeout, func(ctx context.Context) error {
		info, err = s.core.CompleteMultipartUpload(ctx, s.bucket, key, id, parts, minio.PutObjectOptions{})
		return err
	})
	return info, err
}

// abort deletes the parts of a failed upload, also after ctx has ended. A lifecycle rule of the bucket
// has to delete them if the object store is not reachable.
func (s *store) abort(ctx context.Context, key, id string) {
	_ = s.requests.do(context.WithoutCancel(ctx), 5*time.Second, func(ctx context.Context) error {
		return s.core.AbortMultipartUpload(ctx, s.bucket, key, id)
	})
}
