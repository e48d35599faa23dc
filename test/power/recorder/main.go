// Recorder is the program in the sandboxes of package power.
//
//	recorder record           appends numbered records, each with fsync, until it is killed
//	recorder record N         appends N records
//	recorder fill VERSION     replaces the files by the files of a version, without fsync
//	recorder check VERSION N  fails unless the files are exactly the version's and there are N records at least
//	recorder records N        fails unless there are N records at least
package main

import (
	"bytes"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
)

const (
	folder       = "/data"
	log          = folder + "/log"
	acknowledged = folder + "/acknowledged" // the number of records, for readers outside
	files        = folder + "/files"
)

// recordLength is the length of each record: eight digits and a line feed.
const recordLength = 9

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	number := func(i int) int {
		if i >= len(args) {
			return -1
		}
		n, err := strconv.Atoi(args[i])
		if err != nil {
			return -1
		}
		return n
	}
	switch {
	case len(args) > 0 && args[0] == "record":
		return record(number(1))
	case len(args) == 2 && args[0] == "fill":
		return fill(args[1])
	case len(args) == 3 && args[0] == "check":
		return errors.Join(check(args[1]), checkRecords(number(2)), checkNames())
	case len(args) == 2 && args[0] == "records":
		return errors.Join(checkRecords(number(1)), checkNames())
	}
	return fmt.Errorf("unknown command %q", args)
}

// record appends count records, or any number if count is negative.
func record(count int) error {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	dir, err := os.Open(folder)
	if err != nil {
		return err
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	// A loss of power may leave a part of the last record, which was not acknowledged.
	n := int(info.Size() / recordLength)
	if err := f.Truncate(int64(n) * recordLength); err != nil {
		return err
	}
	for ; count != 0; count-- {
		if _, err := fmt.Fprintf(f, "%08d\n", n); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		n++
		if err := os.WriteFile(acknowledged+".new", []byte(strconv.Itoa(n)), 0o644); err != nil {
			return err
		}
		if err := os.Rename(acknowledged+".new", acknowledged); err != nil {
			return err
		}
	}
	return nil
}

func checkRecords(least int) error {
	text, err := os.ReadFile(log)
	if err != nil && (least > 0 || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}
	for n := range least {
		want := fmt.Appendf(nil, "%08d\n", n)
		if got, ok := bytes.CutPrefix(text, want); ok {
			text = got
			continue
		}
		return fmt.Errorf("record %d of %d is missing: the log continues with %.20q", n, least, text)
	}
	return nil
}

// checkNames checks the files that the node makes for the sandbox.
func checkNames() error {
	for _, path := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if len(text) == 0 {
			return fmt.Errorf("%s is empty", path)
		}
	}
	return nil
}

// contents are the files of a version by their path below the folder.
func contents(version string) map[string][]byte {
	sum := fnv.New64a()
	sum.Write([]byte(version))
	random := rand.New(rand.NewPCG(sum.Sum64(), 0))
	list := map[string][]byte{"version": []byte(version)}
	for i := range 60 {
		content := make([]byte, random.IntN(40_000))
		for j := range content {
			content[j] = byte(random.Uint32())
		}
		list[fmt.Sprintf("%d/%d/file", i%5, i)] = content
	}
	return list
}

const (
	symlink  = "symlink"
	hardlink = "hardlink" // to the file version
)

func fill(version string) error {
	if err := os.RemoveAll(files); err != nil {
		return err
	}
	for name, content := range contents(version) {
		path := filepath.Join(files, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o640); err != nil {
			return err
		}
	}
	return errors.Join(os.Symlink(version, filepath.Join(files, symlink)), os.Link(filepath.Join(files, "version"), filepath.Join(files, hardlink)))
}

func check(version string) error {
	want := contents(version)
	want[hardlink] = want["version"]
	var errs []error
	err := filepath.WalkDir(files, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name, err := filepath.Rel(files, path)
		if err != nil {
			return err
		}
		if name == symlink {
			if target, err := os.Readlink(path); err != nil || target != version {
				errs = append(errs, fmt.Errorf("the symbolic link is to %q, %v", target, err))
			}
			return nil
		}
		got, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if content, ok := want[name]; !ok || !bytes.Equal(got, content) {
			errs = append(errs, fmt.Errorf("%s has %d bytes, other than the %d of version %s (in the version: %t)", name, len(got), len(content), version, ok))
		}
		delete(want, name)
		return nil
	})
	for name := range want {
		errs = append(errs, fmt.Errorf("%s is missing", name))
	}
	if len(errs) > 5 {
		errs = append(errs[:5], fmt.Errorf("and %d more", len(errs)-5))
	}
	return errors.Join(append(errs, err)...)
}
