package types

import "time"

// File is an entry of a directory.
type File struct {
	Name       string    `json:"name" doc:"Last element of the path" example:"app.js"`
	Path       string    `json:"path" doc:"Absolute path" example:"/root/app.js"`
	Type       FileType  `json:"type" doc:"Type of the file"`
	Size       int64     `json:"size" doc:"Size in bytes"`
	Mode       string    `json:"mode" doc:"Permissions in octal" example:"0644"`
	ModifiedAt time.Time `json:"modified_at" doc:"When the content was last modified"`
	Target     string    `json:"target,omitempty" doc:"Target of a symbolic link"`
}

// FileType is the type of a file.
type FileType string

const (
	FileTypeFile      FileType = "file"
	FileTypeDirectory FileType = "directory"
	FileTypeSymlink   FileType = "symlink"
	FileTypeOther     FileType = "other"
)

// Values returns all types.
func (FileType) Values() []FileType {
	return []FileType{FileTypeFile, FileTypeDirectory, FileTypeSymlink, FileTypeOther}
}

// FileList is the content of a directory.
type FileList struct {
	Files     []File `json:"files" nullable:"false" doc:"Entries of the directory"`
	Truncated bool   `json:"truncated" doc:"Whether there were more entries than fit into a response; list subdirectories one by one"`
}

// WriteFileRequest writes a small file, for clients that cannot send raw bytes.
type WriteFileRequest struct {
	Path     string   `json:"path" maxLength:"4096" doc:"Absolute path" example:"/root/app.js"`
	Content  string   `json:"content" doc:"Content of the file"`
	Encoding Encoding `json:"encoding,omitempty" default:"utf-8" doc:"Encoding of content"`
	Mode     string   `json:"mode,omitempty" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0644" doc:"Permissions in octal; default: those of the existing file, or 0644 for a new one" example:"0644"`
}

// MakeDirectoryRequest makes a directory with its parents.
type MakeDirectoryRequest struct {
	Path string `json:"path" maxLength:"4096" doc:"Absolute path" example:"/root/data"`
	Mode string `json:"mode,omitempty" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0755" doc:"Permissions in octal; default: 0755" example:"0755"`
}

// MoveFileRequest renames a file or directory.
type MoveFileRequest struct {
	From string `json:"from" maxLength:"4096" doc:"Absolute path" example:"/root/old.js"`
	To   string `json:"to" maxLength:"4096" doc:"New absolute path; an existing file is replaced, an existing directory is not" example:"/root/new.js"`
}

// ArchiveResult is what was unpacked.
type ArchiveResult struct {
	Files int   `json:"files" doc:"Number of entries of all types"`
	Bytes int64 `json:"bytes" doc:"Number of bytes of file content"`
}
