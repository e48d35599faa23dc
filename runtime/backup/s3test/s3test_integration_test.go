//go:build integration

package s3test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// client returns a client of the server that tries each request once.
func client(t *testing.T, s *Server) *minio.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c, err := minio.New(strings.TrimPrefix(s.URL, "http://"), &minio.Options{
		Creds:      credentials.NewStaticV4(s.AccessKey, s.SecretKey, ""),
		Transport:  transport,
		Region:     "us-east-1", // so that the client does not request it
		MaxRetries: 1,
	})
	testkit.NoError(t, "new client", err)
	return c
}

func put(t *testing.T, c *minio.Client, s *Server, key string, data []byte) error {
	t.Helper()
	_, err := c.PutObject(testkit.Context(t), s.Bucket, key, bytes.NewReader(data), int64(len(data)), minio.PutObjectOptions{})
	return err
}

// get returns the bytes of an object that arrive, also after an error.
func get(t *testing.T, c *minio.Client, s *Server, key string) ([]byte, error) {
	t.Helper()
	// GetObject would request the missing bytes again after a cut.
	body, _, _, err := minio.Core{Client: c}.GetObject(testkit.Context(t), s.Bucket, key, minio.GetObjectOptions{})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// random returns n bytes, the same ones in each run.
func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func equal(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes that differ from the expected %d", what, len(got), len(want))
	}
}

func TestServerStoresObjects(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	objects := map[string][]byte{"empty": {}, "small/a b+ü=%2F~": random(10), "small/b/c": random(100), "large": random(6 << 20)}
	var total int64
	for key, data := range objects {
		testkit.NoError(t, "put "+key, put(t, c, s, key, data))
		total += int64(len(data))
	}
	want := []string{"empty", "large", "small/a b+ü=%2F~", "small/b/c"}
	if diff := cmp.Diff(want, s.Objects(t)); diff != "" {
		t.Errorf("objects in the folder (-want +got):\n%s", diff)
	}
	var listed []string
	for o := range c.ListObjects(testkit.Context(t), s.Bucket, minio.ListObjectsOptions{Recursive: true}) {
		testkit.NoError(t, "list", o.Err)
		listed = append(listed, o.Key)
	}
	slices.Sort(listed)
	if diff := cmp.Diff(want, listed); diff != "" {
		t.Errorf("listed objects (-want +got):\n%s", diff)
	}
	for key, data := range objects {
		got, err := get(t, c, s, key)
		testkit.NoError(t, "get "+key, err)
		equal(t, key, got, data)
	}
	// The signatures of chunks are part of a request's body.
	if n := s.Uploaded(); n < total || n > total+total/100+4096 {
		t.Errorf("uploaded %d bytes for %d bytes of objects", n, total)
	}
	if n := s.Requests(); n < int64(2*len(objects)+1) {
		t.Errorf("%d requests", n)
	}
	s.ResetCounts()
	testkit.NoError(t, "remove", c.RemoveObject(testkit.Context(t), s.Bucket, "small/b/c", minio.RemoveObjectOptions{}))
	if diff := cmp.Diff([]string{"empty", "large", "small/a b+ü=%2F~"}, s.Objects(t)); diff != "" {
		t.Errorf("objects after removal (-want +got):\n%s", diff)
	}
	if n, uploaded := s.Requests(), s.Uploaded(); n != 1 || uploaded != 0 {
		t.Errorf("removal: %d requests with %d bytes, want 1 with 0", n, uploaded)
	}
}

func TestServerStoresMultipartUploads(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	data := random(12 << 20)
	_, err := c.PutObject(testkit.Context(t), s.Bucket, "parts", bytes.NewReader(data), int64(len(data)), minio.PutObjectOptions{PartSize: 5 << 20})
	testkit.NoError(t, "put", err)
	if diff := cmp.Diff([]string{"parts"}, s.Objects(t)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	got, err := get(t, c, s, "parts")
	testkit.NoError(t, "get", err)
	equal(t, "parts", got, data)
}

func TestServerRefusesOtherAccounts(t *testing.T) {
	s := Start(t)
	for name, other := range map[string]*Server{
		"wrong secret":   {URL: s.URL, Bucket: s.Bucket, AccessKey: s.AccessKey, SecretKey: "wrong"},
		"wrong account":  {URL: s.URL, Bucket: s.Bucket, AccessKey: "wrong", SecretKey: s.SecretKey},
		"no credentials": {URL: s.URL, Bucket: s.Bucket},
	} {
		if err := put(t, client(t, other), other, "key", random(10)); minio.ToErrorResponse(err).StatusCode != http.StatusForbidden {
			t.Errorf("%s: put: %v, want status 403", name, err)
		}
	}
	if objects := s.Objects(t); len(objects) > 0 {
		t.Errorf("stored objects: %q", objects)
	}
}

func TestFaultStatus(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	for status, code := range map[int]string{403: "AccessDenied", 500: "InternalError", 503: "SlowDown", 507: "InsufficientStorage"} {
		s.Fail(func(*http.Request) Fault { return Fault{Status: status} })
		err := put(t, c, s, "key", random(10))
		if res := minio.ToErrorResponse(err); res.StatusCode != status || res.Code != code {
			t.Errorf("put: %v (status %d, code %s), want %d and %s", err, res.StatusCode, res.Code, status, code)
		}
	}
	if objects := s.Objects(t); len(objects) > 0 {
		t.Errorf("stored objects: %q", objects)
	}
	s.Fail(nil)
	testkit.NoError(t, "put without a fault", put(t, c, s, "key", random(10)))
}

func TestFaultDependsOnTheRequest(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	s.Fail(func(r *http.Request) Fault {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/bad") {
			return Fault{Status: 500}
		}
		return Fault{}
	})
	testkit.NoError(t, "put good", put(t, c, s, "good", random(10)))
	if err := put(t, c, s, "bad", random(10)); err == nil {
		t.Error("put bad succeeded")
	}
}

func TestFaultCutClosesTheConnection(t *testing.T) {
	s := Start(t)
	s.Fail(func(*http.Request) Fault { return Fault{Cut: true} })
	res, err := http.Post(s.URL+"/"+s.Bucket, "", bytes.NewReader(random(6<<20)))
	testkit.ErrorIs(t, "post", err, io.EOF)
	if err == nil {
		res.Body.Close()
	}
	if n := s.Uploaded(); n != 6<<20 {
		t.Errorf("uploaded %d bytes, want all", n)
	}
	if err := put(t, client(t, s), s, "key", random(10)); err == nil {
		t.Error("put succeeded")
	}
	if objects := s.Objects(t); len(objects) > 0 {
		t.Errorf("stored objects: %q", objects)
	}
}

func TestFaultCutResponse(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	data := random(100_000)
	testkit.NoError(t, "put", put(t, c, s, "key", data))
	for _, cut := range []int64{1, 10, 4096, 99_999} {
		s.Fail(func(*http.Request) Fault { return Fault{CutResponse: cut} })
		got, err := get(t, c, s, "key")
		testkit.ErrorIs(t, "get", err, io.ErrUnexpectedEOF)
		equal(t, "the bytes before the cut", got, data[:cut])
	}
	s.Fail(func(*http.Request) Fault { return Fault{CutResponse: 100_001} })
	got, err := get(t, c, s, "key")
	testkit.NoError(t, "get", err)
	equal(t, "a response that is shorter than the cut", got, data)
}

func TestFaultDelay(t *testing.T) {
	const delay = 100 * time.Millisecond
	s := Start(t)
	c := client(t, s)
	s.Fail(func(*http.Request) Fault { return Fault{Delay: delay} })
	start := time.Now()
	testkit.NoError(t, "put", put(t, c, s, "key", random(10)))
	if d := time.Since(start); d < delay {
		t.Errorf("put took %v, want %v or more", d, delay)
	}
}

// A failed test can leave a delayed request.
func TestEndOfTestEndsDelayedRequests(t *testing.T) {
	ended := make(chan struct{})
	t.Run("delayed", func(t *testing.T) {
		s := Start(t)
		delayed := make(chan struct{})
		s.Fail(func(*http.Request) Fault {
			close(delayed)
			return Fault{Delay: time.Hour}
		})
		go func() {
			defer close(ended)
			res, err := http.Post(s.URL, "", strings.NewReader("body"))
			if err == nil {
				res.Body.Close()
				t.Errorf("response: %s", res.Status)
			}
		}()
		testkit.Closed(t, "request is delayed", delayed)
	})
	testkit.Closed(t, "request ends", ended)
}

func TestRestartServesTheSameObjects(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	data := random(10)
	testkit.NoError(t, "put", put(t, c, s, "key", data))
	pid := s.process.cmd.Process.Pid
	s.Stop()
	s.Stop()
	if testkit.Alive(pid) {
		t.Error("the process is running after Stop")
	}
	if _, err := get(t, c, s, "key"); err == nil {
		t.Error("get succeeded while the server is stopped")
	}
	s.Restart()
	got, err := get(t, c, s, "key")
	testkit.NoError(t, "get", err)
	equal(t, "object", got, data)
	s.Restart()
	got, err = get(t, c, s, "key")
	testkit.NoError(t, "get", err)
	equal(t, "object", got, data)
}

func TestCorruptChangesWhatClientsRead(t *testing.T) {
	s := Start(t)
	c := client(t, s)
	for _, size := range []int{1, 15, 16, 17, 1000} {
		data := random(size)
		testkit.NoError(t, "put", put(t, c, s, "folder/key", data))
		s.Corrupt(t, "folder/key")
		got, err := get(t, c, s, "folder/key")
		testkit.NoError(t, "get", err)
		if bytes.Equal(got, data) || len(got) != size {
			t.Errorf("%d bytes: the object is not corrupt", size)
		}
	}
}

// The server must not outlive a test process that was killed.
func TestServerEndsWhenStdinIsClosed(t *testing.T) {
	s := Start(t)
	testkit.NoError(t, "close stdin", s.process.stdin.Close())
	testkit.Closed(t, "process ends", s.process.exited)
	if code := s.process.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
