package bucketfs

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/minio/minio-go/v7"
)

// pageSize is the number of keys in a page of a list, S3's maximum.
const pageSize = 1000

// listing is a request for a page of a list.
type listing struct {
	prefix    string
	delimiter bool // group the keys of subfolders
	token     string
	limit     int
}

// page is a part of a list. The object store is not trusted: keys may be outside of the prefix, or unsorted.
type page struct {
	Contents []struct {
		Key          string
		Size         int64
		ETag         string
		LastModified time.Time
	}
	CommonPrefixes        []struct{ Prefix string }
	IsTruncated           bool
	NextContinuationToken string
	EncodingType          string
}

// list requests a page. It does not use minio-go's function, which has no context.
func (s *store) list(ctx context.Context, l listing) (p page, err error) {
	err = s.requests.do(ctx, requestTimeout, func(ctx context.Context) error {
		for attempt := range maxAttempts {
			if attempt > 0 {
				select {
				case <-time.After(200 * time.Millisecond << attempt):
				case <-ctx.Done():
					return err
				}
			}
			var retry bool
			if p, retry, err = s.listOnce(ctx, l); err == nil || !retry {
				break
			}
		}
		return err
	})
	return p, err
}

func (s *store) listOnce(ctx context.Context, l listing) (p page, retry bool, err error) {
	query := url.Values{"list-type": {"2"}, "encoding-type": {"url"}, "prefix": {l.prefix}, "max-keys": {strconv.Itoa(l.limit)}}
	if l.delimiter {
		query.Set("delimiter", "/")
	}
	if l.token != "" {
		query.Set("continuation-token", l.token)
	}
	u, err := s.core.Presign(ctx, http.MethodGet, s.bucket, "", time.Minute, query)
	if err != nil {
		return page{}, false, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return page{}, false, err
	}
	res, err := s.http.Do(r)
	if err != nil {
		return page{}, ctx.Err() == nil, fmt.Errorf("list %s: %w", s.bucket, errors.Unwrap(err)) // without the signed URL
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return page{}, res.StatusCode >= 500 || res.StatusCode == http.StatusTooManyRequests, listError(res)
	}
	if err := xml.NewDecoder(res.Body).Decode(&p); err != nil {
		return page{}, ctx.Err() == nil, fmt.Errorf("list %s: %w", s.bucket, err)
	}
	return p, false, p.decode()
}

// listError returns the error of a response.
func listError(res *http.Response) error {
	failure := minio.ErrorResponse{StatusCode: res.StatusCode}
	body, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err == nil {
		_ = xml.Unmarshal(body, &failure) // without XML, only the status is known
	}
	failure.StatusCode = res.StatusCode
	if failure.Message == "" {
		failure.Message = res.Status
	}
	return failure
}

// decode decodes the keys.
func (p *page) decode() error {
	if p.EncodingType != "url" {
		return nil
	}
	for i := range p.Contents {
		if err := unescape(&p.Contents[i].Key); err != nil {
			return err
		}
	}
	for i := range p.CommonPrefixes {
		if err := unescape(&p.CommonPrefixes[i].Prefix); err != nil {
			return err
		}
	}
	return nil
}

func unescape(key *string) error {
	decoded, err := url.QueryUnescape(*key)
	if err != nil {
		return fmt.Errorf("list has an invalid key: %w", err)
	}
	*key = decoded
	return nil
}
