package objectstore

import (
	"crypto/x509"
	"errors"
	"fmt"
	"testing"

	"github.com/minio/minio-go/v7"
)

func TestClassify(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want Code
	}{
		"forbidden":      {minio.ErrorResponse{StatusCode: 403, Code: "AccessDenied"}, Denied},
		"unauthorized":   {minio.ErrorResponse{StatusCode: 401}, Denied},
		"missing bucket": {minio.ErrorResponse{StatusCode: 404, Code: minio.NoSuchBucket}, NoBucket},
		"server error":   {minio.ErrorResponse{StatusCode: 500}, Unreachable},
		"network error":  {errors.New("connection refused"), Unreachable},
	} {
		err := fmt.Errorf("request: %w", c.err)
		got := Classify(err)
		if got.Code != c.want || got.Message != err.Error() || !errors.Is(got, c.err) {
			t.Errorf("%s: %q %q, want code %q", name, got.Code, got.Message, c.want)
		}
	}
}

func TestClassifyNamesTheUnknownAuthorityOnly(t *testing.T) {
	cause := x509.UnknownAuthorityError{}
	if got := Classify(fmt.Errorf("request to https://s3: %w", cause)); got.Message != cause.Error() {
		t.Errorf("message %q, want %q", got.Message, cause.Error())
	}
}
