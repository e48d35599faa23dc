package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// pack writes what is in a folder as a tar stream with paths relative to it. Its
// files belong to root there.
func (c *copying) pack(folder string, w io.Writer) error {
	out := tar.NewWriter(w)
	err := filepath.WalkDir(folder, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, file)
		if err != nil || name == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return c.packEntry(out, file, filepath.ToSlash(name), info)
	})
	if err != nil {
		return err
	}
	return out.Close()
}

func (c *copying) packEntry(out *tar.Writer, file, name string, info fs.FileInfo) error {
	link := ""
	switch {
	case info.Mode().IsRegular(), info.IsDir():
	case info.Mode()&fs.ModeSymlink != 0:
		var err error
		if link, err = os.Readlink(file); err != nil {
			return err
		}
		if !staysInside(name, link) {
			c.leftOut(file, "it links out of the folder, to "+link)
			return nil
		}
	default:
		c.leftOut(file, "it is neither a file, a folder nor a link")
		return nil
	}
	header, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	header.Name = name
	if info.IsDir() {
		header.Name += "/"
	}
	header.Uid, header.Gid, header.Uname, header.Gname = 0, 0, "", ""
	header.Format = tar.FormatPAX
	if !info.Mode().IsRegular() {
		return out.WriteHeader(header)
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	c.files.Add(1)
	// What grows meanwhile is copied as long as it was.
	if _, err := io.CopyN(out, c.counting(f), header.Size); err == io.EOF {
		return fmt.Errorf("%s became shorter while it was copied", file)
	} else if err != nil {
		return err
	}
	return nil
}

// staysInside says whether a link with that name in a folder leads to something in
// the folder.
func staysInside(name, link string) bool {
	return !path.IsAbs(link) && filepath.IsLocal(path.Join(path.Dir(name), link))
}

// unpack writes a tar stream from a sandbox into a folder. The sandbox may be
// hostile: nothing is written outside of the folder, whatever names, links and
// modes it sends.
func (c *copying) unpack(stream io.Reader, folder string) error {
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	in := tar.NewReader(stream)
	for {
		header, err := next(in)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(header.Name)
		if name == "." {
			continue
		}
		if !filepath.IsLocal(name) {
			return fmt.Errorf("the sandbox sent %q, which lies outside of the folder; stopped", clean(header.Name))
		}
		if err := c.unpackEntry(root, in, header, name); err != nil {
			return fmt.Errorf("unpacking %s: %w", clean(name), err)
		}
	}
}

// next returns the next header. A sparse file could make a short stream fill the
// disk, so it is refused; doze-guest sends none.
func next(in *tar.Reader) (*tar.Header, error) {
	header, err := in.Next()
	if err == io.EOF {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("the tar stream from the sandbox broke off: %w", err)
	}
	sparse := header.Typeflag == tar.TypeGNUSparse
	for key := range header.PAXRecords {
		sparse = sparse || strings.HasPrefix(key, "GNU.sparse.")
	}
	if sparse {
		return nil, fmt.Errorf("the sandbox sent %q as a sparse file; stopped", clean(header.Name))
	}
	return header, nil
}

func (c *copying) unpackEntry(root *os.Root, in io.Reader, header *tar.Header, name string) error {
	mode := fs.FileMode(header.Mode) & 0o777
	if header.Typeflag == tar.TypeDir {
		if err := root.MkdirAll(name, 0o777); err != nil {
			return err
		}
		return root.Chmod(name, mode|0o700) // or else nothing could go into it
	}
	if dir := path.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o777); err != nil {
			return err
		}
	}
	switch header.Typeflag {
	case tar.TypeReg:
		if err := makeWay(root, name); err != nil {
			return err
		}
		f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		return c.fill(f, in, header)
	case tar.TypeSymlink:
		if !staysInside(name, header.Linkname) {
			c.leftOut(name, "it links out of the folder, to "+header.Linkname)
			return nil
		}
		if err := makeWay(root, name); err != nil {
			return err
		}
		return root.Symlink(header.Linkname, name)
	case tar.TypeLink:
		if err := makeWay(root, name); err != nil {
			return err
		}
		return root.Link(path.Clean(header.Linkname), name)
	}
	c.leftOut(name, "it is neither a file, a folder nor a link")
	return nil
}

// makeWay removes a file or link, so that nothing is written through it.
func makeWay(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// fill writes the content, mode and time of an entry to f and closes it.
func (c *copying) fill(f *os.File, in io.Reader, header *tar.Header) (err error) {
	defer func() { err = errors.Join(err, f.Close()) }()
	c.files.Add(1)
	if _, err := io.Copy(f, c.counting(in)); err != nil {
		return err
	}
	return f.Chmod(fs.FileMode(header.Mode) & 0o777)
}

// unpackFile writes the first file of a tar stream to target, all of it or nothing.
func (c *copying) unpackFile(stream io.Reader, target string) error {
	in := tar.NewReader(stream)
	header, err := next(in)
	for err == nil && header.Typeflag != tar.TypeReg {
		header, err = next(in)
	}
	if err == io.EOF {
		return errors.New("the sandbox sent no file")
	}
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(target), ".doze-cp-*")
	if err != nil {
		return err
	}
	if err := c.fill(f, in, header); err != nil {
		os.Remove(f.Name())
		return err
	}
	if err := os.Rename(f.Name(), target); err != nil {
		os.Remove(f.Name())
		return err
	}
	return nil
}
